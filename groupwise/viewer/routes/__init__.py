"""The functions behind the page's paths, thin over `groupwise.analysis`."""
