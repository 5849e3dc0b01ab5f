"""The list of features; importing it from where MindSpeed has it."""

FEATURES_LIST = []
