"""What the demo and the benchmarks measure servax against, and the requests they send."""
