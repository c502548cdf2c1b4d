"""What families share: the base class, noise levels, random draws, encoding and sampling."""
