"""The arguments that every peer's server takes."""

import argparse


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", choices=("mlp", "encoder"))
    parser.add_argument("parameters", help="an npz; of TensorFlow's server a SavedModel")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--grpc-port", type=int, required=True)
    parser.add_argument("--warm", action="store_true", help="compile every shape before serving")
    parser.add_argument("--inline", action="store_true", help="call the network on the event loop")
    return parser.parse_args()
