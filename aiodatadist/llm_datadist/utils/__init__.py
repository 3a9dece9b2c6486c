"""Argument checks and the logger, under the module paths of the original."""
