"""`python -m sepsa` is the command `sepsa`."""

from sepsa.cli import main

main()
