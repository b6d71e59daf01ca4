"""One checkpoint streamed into another: sources, targets, groups, and the journal between them."""
