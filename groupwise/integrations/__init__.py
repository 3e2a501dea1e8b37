"""groupwise inside other frameworks. Each is imported inside the functions that need it; nobody imports these."""
