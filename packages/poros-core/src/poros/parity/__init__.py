"""The exactness gate: the stock reference run, the compared surfaces and the verdict."""
