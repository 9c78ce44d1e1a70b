// Tooltips with all the words of what is cut, made when the pointer comes, because there are many.

addEventListener("mouseover", ({ target }) => {
  const mark = target.closest?.(".bar-g, .node");
  if (mark) {
    const title =
      mark.querySelector("title") ??
      mark.appendChild(document.createElementNS("http://www.w3.org/2000/svg", "title"));
    title.textContent = mark.getAttribute("aria-label");
  }
  const element = target.closest?.(".cut");
  if (element?.scrollWidth > element?.clientWidth && (!element.title || element.dataset.cut)) {
    element.dataset.cut = "yes"; // The title is not of a component.
    element.title = element.textContent;
  }
});
