"""Text encoders and VAEs, laid out from their recordings as the step is.

`component_pass` says which run, and at which shape; `component_layout` lays one out, with `tiles` where it runs several
times; `encoding_memory` is what encoding before training takes.
"""
