"""What a run says: metrics, console, pictures, summaries."""
