"""Running a stock model whose frozen base streams: prologue, templates, executor and the autograd function."""
