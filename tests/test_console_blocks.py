"""console_blocks.py: pages whose commands are run again."""

from __future__ import annotations

from console_blocks import needs_no_gpu, rewritten

PAGE = """Before.

```console
$ python -c "print('new')" \\
      --arch
old
lines
```

```console
$ python -c "print('needs a GPU')"
as it was
```
"""


def test_output_is_replaced_below_its_command() -> None:
    assert rewritten(PAGE) == PAGE.replace("old\nlines\n", "new\n")


def test_commands_that_need_the_gpu_of_the_page_stay() -> None:
    assert needs_no_gpu("python -m cufa explain --gpu h100")
    assert not needs_no_gpu("python -m cufa explore --top 10")
