"""A service of two replicas on a Ray cluster: ``python examples/ray_serve.py``.

It answers OpenAI's API at ``http://127.0.0.1:8000/v1``, so ``examples/streaming_client.py`` reads from it. Ray Serve
sends every request to one of the replicas, and starts another one when a replica fails.
"""

import argparse
from threading import Event

from ray import serve
from ray.serve.handle import DeploymentHandle

from specdec_fast.assets import demo_pair
from specdec_fast.integrations.ray import EngineDeployment


def deploy(replicas: int = 2, cpus: int = 1, gpus: int = 0) -> DeploymentHandle:
    """Deploy the bundled pair and wait until its replicas are warm; return a handle to them."""
    deployment = EngineDeployment.options(
        num_replicas=replicas,
        ray_actor_options={"num_cpus": cpus, "num_gpus": gpus},
        graceful_shutdown_timeout_s=30,
    )
    application = deployment.bind(
        str(demo_pair() / "target"), str(demo_pair() / "draft"), app_options={"model_names": ["demo"]}, max_batch_size=8
    )
    return serve.run(application, name="demo")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--cpus", type=int, default=1, help="of each replica; its engine computes with as many threads")
    parser.add_argument("--gpus", type=int, default=0, help="of each replica")
    args = parser.parse_args()
    serve.start(http_options={"port": args.port})
    deploy(args.replicas, args.cpus, args.gpus)
    print(f"http://127.0.0.1:{args.port}/v1; end with Ctrl-C", flush=True)
    try:
        Event().wait()
    except KeyboardInterrupt:
        serve.shutdown()
