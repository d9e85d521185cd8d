"""The door for transformers: a cache for unmodified generate(), and the attention function that feeds it."""
