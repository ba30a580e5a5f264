"""The words that every room shares: errors, tensors, trees, events and the counting of compilations."""
