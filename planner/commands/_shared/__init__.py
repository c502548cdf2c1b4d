"""What the verbs share: options, the request, tables and progress bars."""
