"""What a cache method costs in quality: tasks, decoding with the evicting cache, intervals, pictures."""
