"""Names of models: how they are compared, which have no profile, and which trainers list them."""
