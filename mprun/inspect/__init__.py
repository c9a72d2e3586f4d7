"""A close look at a recipe: a module for each question, whose function measures a `Result`."""
