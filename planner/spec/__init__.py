"""What a user asks for: jobs, strategies, machines and plans, and the rules between them."""
