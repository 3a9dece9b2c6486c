"""The part of ``--cpu``."""
