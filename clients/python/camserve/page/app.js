/** The page: build its panels, then connect to the server. */
import { analysisPanel } from "./panels/analysis.js";
import { connectionPanel } from "./panels/connection.js";
import { controlsPanel } from "./panels/controls.js";
import { gridPanel, resetLook } from "./panels/grid.js";
import { photosPanel } from "./panels/photos.js";
import { themeButton } from "./panels/theme.js";
import { connect } from "./server.js";
import { changed, fragment, on, readAddress } from "./state.js";
import { debounced } from "./dom.js";

readAddress();
themeButton();
connectionPanel();
photosPanel();
gridPanel();
controlsPanel();
analysisPanel();

/** Keep the address up to date, so that a reload or a bookmark restores everything but the photo. */
const writeAddress = debounced(() => history.replaceState(null, "", fragment()), 300);
on(["ask", "style"], writeAddress);

addEventListener("hashchange", () => {
  if (!readAddress()) return;
  resetLook();
  changed("style");
  changed("models");
});

connect();
