"""What people look at: plans (`plan`), runs as they go (`live`) and as they are (`run`)."""
