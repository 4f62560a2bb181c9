"""`python -m sepsa` is the command `sepsa`."""

from sepsa.shell.cli import main

main()
