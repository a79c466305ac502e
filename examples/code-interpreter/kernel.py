"""A kernel of the code interpreter: kernel.py python or kernel.py bash, then the arguments of a Jupyter kernel.

An execute_request may carry variables in its metadata: "sandbox" are set for good, "run" until the code has ended.
"""
import json
import os
import shlex
import sys
import warnings

from bash_kernel.kernel import BashKernel
from ipykernel.ipkernel import IPythonKernel
from ipykernel.kernelapp import IPKernelApp
from IPython.core.formatters import BaseFormatter
from traitlets import ObjectName, Unicode

MAX_CELLS = 100_000  # of a data frame that is returned as data


class Python(IPythonKernel):
    async def do_execute(self, *args, **kwargs):
        variables = self.get_parent()["metadata"]
        os.environ.update(variables.get("sandbox", {}))
        of_run = variables.get("run", {})
        before = {name: os.environ.get(name) for name in of_run}
        os.environ.update(of_run)
        try:
            return await super().do_execute(*args, **kwargs)
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


class Bash(BashKernel):
    def do_execute(self, code, silent, store_history=True, user_expressions=None, allow_stdin=False):
        variables = self.get_parent()["metadata"]
        self.silent = True  # what follows prints nothing
        for name, value in variables.get("sandbox", {}).items():
            if name.isascii() and name.isidentifier():  # bash knows no others
                self.bashwrapper.run_command(f"export {name}={shlex.quote(value)}")
        before = []
        for name, value in variables.get("run", {}).items():
            before.append(self.bashwrapper.run_command(f"declare -p {name} 2>/dev/null || echo unset {name}"))
            self.bashwrapper.run_command(f"export {name}={shlex.quote(value)}")
        try:
            return super().do_execute(code, silent, store_history, user_expressions, allow_stdin)
        finally:
            self.silent = True
            for command in before:
                self.bashwrapper.run_command(command.strip())


class Data(BaseFormatter):
    """What E2B's SDKs show as data: the columns of a pandas DataFrame."""

    format_type, print_method, _return_type = Unicode("e2b/data"), ObjectName("_repr_e2b_data_"), (dict,)


class Chart(BaseFormatter):
    """What E2B's SDKs show as chart: the elements of a Matplotlib figure."""

    format_type, print_method, _return_type = Unicode("e2b/chart"), ObjectName("_repr_e2b_chart_"), (dict,)

    def __call__(self, obj):
        # A printer for the type would not last: IPython removes those of figures when it loads Matplotlib.
        if f"{type(obj).__module__}.{type(obj).__name__}" == "matplotlib.figure.Figure":
            return elements(obj)
        return super().__call__(obj)


def columns(frame):
    if frame.size > MAX_CELLS:
        return None
    rows = json.loads(frame.reset_index(drop=True).to_json(date_format="iso"))
    return {name: list(values.values()) for name, values in rows.items()}


def elements(figure):
    from e2b_charts import chart_figure_to_dict

    try:
        with warnings.catch_warnings(action="ignore"):  # not of the code that runs
            chart = chart_figure_to_dict(figure)
        return json.loads(json.dumps(chart, default=str), parse_constant=lambda _: None) or None
    except Exception:  # of a figure that it does not understand; its picture is shown
        return None


def main():
    sys.path[0] = ""  # imports begin in the working directory, as with Jupyter's own launcher
    language = sys.argv.pop(1)
    if language == "bash":
        IPKernelApp.launch_instance(kernel_class=Bash)
        return
    app = IPKernelApp.instance(kernel_class=Python)
    app.initialize()
    formatters = app.shell.display_formatter.formatters
    data = formatters["e2b/data"] = Data(parent=app.shell.display_formatter)
    for module in ("pandas", "pandas.core.frame"):  # its name in version 3, and before
        data.for_type_by_name(module, "DataFrame", columns)
    formatters["e2b/chart"] = Chart(parent=app.shell.display_formatter)
    app.start()


if __name__ == "__main__":
    main()
