"""Several agents write a game: an architect, three coders, a reviewer, three revisers.

                    architect                  one call, three outputs
        coder         coder         coder      main.py, game.py, snake.py
                    reviewer
       reviser       reviser       reviser

The whole graph is submitted before anything runs. A small model does not write a good game. The
example shows how calls depend on each other (docs/python.md)."""

from common import make_parser, run, show

from parrot import P

FILES = ("main.py", "game.py", "snake.py")
API = P.SamplingConfig(temperature=0, max_gen_length=32, stop_str="```")
CODE = P.SamplingConfig(temperature=0, max_gen_length=64, stop_str="```")
TEXT = P.SamplingConfig(temperature=0, max_gen_length=48)


@P.semantic_function(formatter=P.allowing_newline)
def architect(main_api: P.Output(API), game_api: P.Output(API), snake_api: P.Output(API)):
    """You are a software architect. Design the functions of a snake game for the terminal, in
    Python: their signatures, with comments, file by file.

    main.py:
    ```python
    {{main_api}}
    ```

    game.py:
    ```python
    {{game_api}}
    ```

    snake.py:
    ```python
    {{snake_api}}
    ```"""


@P.semantic_function(formatter=P.allowing_newline)
def coder(api: P.Input, file_name: str, code: P.Output(CODE)):
    """You are a programmer. Implement every function of {{file_name}}, and nothing else.

    The functions:
    {{api}}

    {{file_name}}:
    ```python
    {{code}}"""


@P.semantic_function(formatter=P.allowing_newline)
def reviewer(main_code: P.Input, game_code: P.Input, snake_code: P.Input, review: P.Output(TEXT)):
    """You are a code reviewer. Comment on the code of a snake game; write no code.

    main.py:
    {{main_code}}

    game.py:
    {{game_code}}

    snake.py:
    {{snake_code}}

    Comments: {{review}}"""


@P.semantic_function(formatter=P.allowing_newline)
def reviser(code: P.Input, review: P.Input, file_name: str, revised: P.Output(CODE)):
    """You are a programmer. This is your code of {{file_name}}:
    {{code}}

    Comments of the reviewer: {{review}}

    The revised {{file_name}}:
    ```python
    {{revised}}"""


def main() -> None:
    apis = architect()
    codes = [coder(api, name) for api, name in zip(apis, FILES, strict=True)]
    review = reviewer(*codes)
    revised = [reviser(code, review, name) for code, name in zip(codes, FILES, strict=True)]
    for name, code in zip(FILES, revised, strict=True):
        show(name, code)
    show("Review", review)


if __name__ == "__main__":
    run(P.VirtualMachine(make_parser(__doc__).parse_args().core), main)
