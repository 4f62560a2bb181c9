"""Tables: readers of rows, columns as inputs, the model, and the commands `sepsa stream`, `predict` and `inspect`."""
