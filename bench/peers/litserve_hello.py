"""`litserve_hello.py PORT`: the smallest LitServe server, one worker process."""

import sys

import litserve


class Hello(litserve.LitAPI):
    """Says hello."""

    def setup(self, device):
        """Nothing to load."""

    def predict(self, request):
        """Say hello."""
        return {"hello": "world"}


if __name__ == "__main__":
    litserve.LitServer(Hello(), accelerator="cpu").run(
        host="127.0.0.1", port=int(sys.argv[1]), log_level="warning", generate_client_file=False
    )
