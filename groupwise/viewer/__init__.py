"""The page of `groupwise view` and the file of `groupwise report`: what `groupwise.analysis` reads, for a browser."""
