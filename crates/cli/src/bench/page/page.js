// The figures of a point beside the pointer, at once; without scripts the titles show them after a while.
const tip = Object.assign(document.createElement("div"), { id: "tip", hidden: true });
document.body.append(tip);
for (const point of document.querySelectorAll(".point")) {
  point.querySelector("title").remove();
  point.addEventListener("pointerleave", () => (tip.hidden = true));
  point.addEventListener("pointerenter", (event) => {
    tip.textContent = point.dataset.text;
    tip.hidden = false;
    const left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8);
    Object.assign(tip.style, { left: `${left}px`, top: `${event.clientY + 14}px` });
  });
}
