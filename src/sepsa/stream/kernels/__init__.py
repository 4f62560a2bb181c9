"""What all compiled code of streams shares: a learner's memory, declared once as a table of parts."""
