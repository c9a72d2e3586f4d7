"""The commands, one module each. A module's text is the command's help."""
