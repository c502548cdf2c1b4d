"""What people look at: pages built from plans and measurements. Nothing here computes a number."""
