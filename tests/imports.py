"""A contract for import-linter: no file imports itself by way of others.

import-linter's own ``acyclic_siblings`` compares what stands beside each other in one package, so a module and the
``__init__`` of its package may import each other there; here they may not. Imports inside functions and those for type
checkers count too.
"""

from __future__ import annotations

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, output
from importlinter.application.contract_utils import AlertLevel, remove_ignored_imports_and_report
from importlinter.domain import fields


def circles(graph: ImportGraph) -> list[tuple[str, ...]]:
    """The shortest circle of each import that closes one, each circle once, starting at its first name."""
    found = set()
    for importer in graph.modules:
        for imported in graph.find_modules_directly_imported_by(importer):
            chain = graph.find_shortest_chain(imported, importer)
            if chain:
                first = chain.index(min(chain))
                found.add((*chain[first:], *chain[:first]))
    return sorted(found)


class NoCircles(Contract):
    """``ignore_imports`` names imports that are not counted, as in import-linter's own contracts."""

    type_name = "no_circles"

    ignore_imports = fields.SetField(subfield=fields.ImportExpressionField(), required=False)

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        ignored = remove_ignored_imports_and_report(graph, self.ignore_imports, AlertLevel.ERROR)
        found = circles(graph)
        return ContractCheck(
            kept=not found,
            warnings=list(ignored.warnings),
            ignored_import_count=ignored.ignored_import_count,
            metadata={"circles": found},
        )

    def render_broken_contract(self, check: ContractCheck) -> None:
        for circle in check.metadata["circles"]:
            output.print_error(" imports ".join((*circle, circle[0])), bold=False)
