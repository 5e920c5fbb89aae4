"""What ranks tell each other beside training: who waits for whom, how ranks end, and that a wait will not."""
