"""The HTTP service: accepts documents and jobs and owns the database. It never loads MLX."""
