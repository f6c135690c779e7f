// The adapters (LoRA) that requests can choose by the name of their model.

import {$, fill, make} from "./dom.js";

const COLUMNS = ["Name", "Files", "Digest"];

// `models` are those of /v1/models that have a parent.
export function drawAdapters(models) {
  const head = make("thead", {role: "rowgroup"}, make("tr", {role: "row"},
    ...COLUMNS.map(name => make("th", {role: "columnheader", scope: "col"}, name))));
  const rows = models.map(({id, root, digest}) => make("tr", {role: "row", "data-key": id},
    ...[id, root ?? "", (digest ?? "").slice(0, 12)].map((content, at) =>
      make("td", {role: "cell", "data-label": COLUMNS[at], title: at === 2 ? digest : null}, content))));
  $("adapters").hidden = !models.length;
  fill("adapters-table", head, make("tbody", {role: "rowgroup"}, ...rows));
}
