"""The generator: ``schemas/*.toml`` to ``rd2h/wire/``, ``docs/protocol.md`` and a JSON Schema.

It lives beside the package, not in it, and the package never imports it. Run it as
``python -m codegen generate | check | freeze`` from the root of the repository.

Data flows one way: :mod:`codegen.schema` (what a schema file is) and :mod:`codegen.types` (its
type language) feed :mod:`codegen.evolution` (what may change between versions) and the writers
:mod:`codegen.python_messages`, :mod:`codegen.python_tables`, :mod:`codegen.python_rendezvous`,
:mod:`codegen.markdown` and :mod:`codegen.json_schema`; :mod:`codegen.outputs` gathers what they
wrote and compares it with the tree.
"""
