"""Plans of a cluster before it exists: step times, a simulation of workers, and layouts compared by goodput."""
