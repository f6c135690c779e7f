// The panels beside the chat: the list of conversations, and the settings. On wide screens they are columns; on others
// sheets above the page, which Escape closes.

import {make} from "./dom.js";

const wide = matchMedia("(min-width: 1100px)");

// A panel and the button that opens and closes it.
export function panel(id, title, ...content) {
  const close = make("button", {type: "button", class: "plain", "aria-label": `Close ${title.toLowerCase()}`}, "Close");
  const dialog = make("dialog", {id, class: "panel", "aria-label": title},
    make("div", {class: "panel-head"}, make("h2", {}, title), close), ...content);
  const toggle = make("button", {type: "button", "aria-controls": id, class: "toggle"}, title);
  let isWanted = true;  // as a column

  const draw = open => {
    if (dialog.open) dialog.close();
    if (open && wide.matches) dialog.open = true;  // neither a modal nor focused
    else if (open) dialog.showModal();
    toggle.setAttribute("aria-expanded", dialog.open);
  };
  toggle.addEventListener("click", () => {
    draw(!dialog.open);
    if (wide.matches) isWanted = dialog.open;
  });
  close.addEventListener("click", () => {
    if (wide.matches) isWanted = false;
    draw(false);
    toggle.focus();
  });
  dialog.addEventListener("close", () => toggle.setAttribute("aria-expanded", dialog.open));
  dialog.addEventListener("click", event => event.target === dialog && dialog.close());  // beside the sheet
  wide.addEventListener("change", () => draw(wide.matches && isWanted));
  draw(wide.matches);
  return {dialog, toggle, open: () => dialog.open || draw(true), closeSheet: () => wide.matches || draw(false)};
}
