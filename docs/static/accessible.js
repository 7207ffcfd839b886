// What Furo's pages lack for screen readers and for the keyboard: names of the sidebars, levels of the captions in the
// list of pages, a first heading of the search, and a focus for code and tables that scroll sideways.
document.addEventListener("DOMContentLoaded", () => {
  document.querySelector(".sidebar-drawer")?.setAttribute("aria-label", "Pages");
  document.querySelector(".toc-drawer")?.setAttribute("aria-label", "On this page");
  for (const caption of document.querySelectorAll(".caption[role=heading]")) caption.setAttribute("aria-level", "2");
  if (!document.querySelector("h1")) {
    const heading = document.createElement("h1");
    heading.textContent = "Search";
    document.querySelector("[role=main]")?.prepend(heading);
  }
  for (const region of document.querySelectorAll("pre, .table-wrapper")) region.tabIndex = 0;
});
