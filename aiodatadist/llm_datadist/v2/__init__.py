"""The second version of the interface, under the module paths of the original."""
