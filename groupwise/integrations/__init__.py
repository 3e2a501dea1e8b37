"""groupwise inside other frameworks, which are imported only inside functions."""
