"""How `bench/serving.py` measures: load, wires, servers, processes, report."""
