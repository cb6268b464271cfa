"""`pyodide.ffi`: the border to JavaScript, which is none here: values are Python's on both sides."""

from workers._js.ffi import (
    ConversionError,
    JsArray,
    JsBuffer,
    JsException,
    JsMap,
    JsProxy,
    JsTypedArray,
    can_run_sync,
    create_once_callable,
    create_proxy,
    destroy_proxies,
    jsnull,
    register_js_module,
    run_sync,
    to_js,
    unregister_js_module,
)

JsDoubleProxy = JsProxy
JsError = JsException
JsNull = type(jsnull)

__all__ = [
    "ConversionError",
    "JsArray",
    "JsBuffer",
    "JsDoubleProxy",
    "JsError",
    "JsException",
    "JsMap",
    "JsNull",
    "JsProxy",
    "JsTypedArray",
    "can_run_sync",
    "create_once_callable",
    "create_proxy",
    "destroy_proxies",
    "jsnull",
    "register_js_module",
    "run_sync",
    "to_js",
    "unregister_js_module",
]
