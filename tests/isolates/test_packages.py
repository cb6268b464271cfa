"""Packages in real isolates: where they are found, and that well-known ones work under the sandbox."""

from __future__ import annotations

import importlib.util
import json

import pytest

from edge.config import Config
from edge.errors import DependenciesFailed
from edge.node.dependencies import prepare

USES = {
    "numpy": """
        import numpy
        rng = numpy.random.default_rng(0)
        a = rng.random((200, 200))
        assert numpy.allclose(numpy.linalg.inv(a) @ a, numpy.eye(200), atol=1e-6)
    """,
    "pydantic": """
        import datetime
        import pydantic
        class Item(pydantic.BaseModel):
            name: str
            at: datetime.datetime
        assert Item.model_validate_json('{"name": "a", "at": "2026-01-01T00:00:00Z"}').at.year == 2026
        try:
            Item(name=1, at="never")
        except pydantic.ValidationError as error:
            assert error.error_count() == 2
    """,
    "httpx": """
        import httpx
        transport = httpx.MockTransport(lambda request: httpx.Response(200, json={"url": str(request.url)}))
        async with httpx.AsyncClient(transport=transport) as client:
            assert (await client.get("https://a.example/")).json() == {"url": "https://a.example/"}
    """,
    "fastapi": """
        import fastapi, httpx
        app = fastapi.FastAPI()
        @app.get("/items/{number}")
        def item(number: int) -> dict[str, int]:
            return {"number": number}
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://a") as client:
            assert (await client.get("/items/7")).json() == {"number": 7}
            assert (await client.get("/items/x")).status_code == 422
            assert "/items/{number}" in (await client.get("/openapi.json")).text
    """,
    "flask": """
        import flask
        app = flask.Flask("app")
        @app.get("/<name>")
        def hello(name):
            return flask.render_template_string("Hello {{ name }}", name=name)
        assert app.test_client().get("/you").text == "Hello you"
    """,
    "django": """
        import zoneinfo
        import django
        from django.conf import settings
        settings.configure(SECRET_KEY="x", USE_TZ=True, TIME_ZONE="Europe/Berlin", TEMPLATES=[
            {"BACKEND": "django.template.backends.django.DjangoTemplates"}])
        django.setup()
        from django.template import engines
        from django.utils import timezone
        assert engines["django"].from_string("{{ a|title }}").render({"a": "hello"}) == "Hello"
        assert timezone.localtime().tzinfo == zoneinfo.ZoneInfo("Europe/Berlin")
    """,
    "PIL": """
        import io
        from PIL import Image, ImageDraw, ImageFont
        image = Image.new("RGB", (200, 100), "white")
        ImageDraw.Draw(image).text((10, 10), "hello", fill="black", font=ImageFont.load_default(20))
        for kind in ("PNG", "JPEG", "WEBP"):
            file = io.BytesIO()
            image.resize((100, 50), Image.Resampling.LANCZOS).save(file, kind)
            assert Image.open(io.BytesIO(file.getvalue())).size == (100, 50)
    """,
}
DISTRIBUTIONS = {"PIL": "pillow"}


@pytest.mark.parametrize("module", USES)
async def test_well_known_packages_work(worker, module):
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed")
    await worker.deploy(f"async def fetch(self, request):\n{USES[module]}\n        return Response('works')")
    assert await worker.get() == "works"


@pytest.mark.slow
async def test_well_known_packages_work_from_a_layer(worker):
    """The same from wheels that pip finds, with nothing of the test's environment among them."""
    names = [DISTRIBUTIONS.get(module, module) for module in USES]
    (worker.root / "requirements.txt").write_text("\n".join(names))
    try:
        folders = await prepare(Config("test", worker.root / "worker_main.py"), worker.root / ".edge", print)
    except DependenciesFailed as error:
        pytest.skip(f"no package index: {error.message[-300:]}")
    for module, code in USES.items():
        source = f"async def fetch(self, request):\n{code}\n        return Response({module}.__file__)"
        await worker.deploy(
            source.replace("import Image,", "import Image; import PIL; from PIL import"), search_paths=folders
        )
        assert (await worker.get()).startswith(folders[0]), module


async def test_a_layer_goes_before_the_packages_of_the_runtime(worker, tmp_path):
    layer = tmp_path / "layer"
    for name, text in {
        "httpx/__init__.py": "VERSION = 'of the layer'",
        "workers/__init__.py": "raise ImportError('not the one of the runtime')",
        "js.py": "raise ImportError('not the one of the runtime')",
        "helper.py": "VERSION = 'of the layer'",
        "only_here.py": "VERSION = 'of the layer'",
    }.items():
        file = layer / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    (tmp_path / "helper.py").write_text("VERSION = 'of the worker'")
    await worker.deploy(
        """
        async def fetch(self, request):
            import helper, httpx, js, only_here, starlette
            return Response.json([helper.VERSION, httpx.VERSION, only_here.VERSION, starlette.__name__])
        """,
        search_paths=(str(layer),),
    )
    assert json.loads(await worker.get()) == ["of the worker", "of the layer", "of the layer", "starlette"]
