/** The state of the connection, and the form for a token. */
import { byId, fill, h, labelled } from "../dom.js";
import { connect, useToken } from "../server.js";
import { on, state } from "../state.js";

export function connectionPanel() {
  const { status, text } = state.connection;
  const place = byId("connection");
  place.dataset.status = status;
  const short = { ready: "Connected", waiting: "Reconnecting", token: "Token required", failed: "Not connected" }[status] ?? text;
  fill(place, h("span.dot", { "aria-hidden": "true" }), short);
  const notice = byId("notice");
  if (status === "token") return notice.querySelector("form") ? showRefusal(text) : fill(notice, tokenForm(text));
  if (status === "waiting") return fill(notice, h("p.notice", text));
  if (status === "failed") return fill(notice, h("div.notice.problem", { role: "alert" }, h("p", text), h("button", { onclick: connect }, "Try again")));
  return status === "ready" ? fill(notice) : null;
}

function showRefusal(text) {
  byId("notice").querySelector(".refusal").textContent = text;
}

function tokenForm(text) {
  const input = h("input", { type: "password", autocomplete: "off", required: true, spellcheck: "false" });
  const field = labelled("Token", input, { hint: "It stays in the memory of this tab and is sent with each request." });
  const submit = (event) => {
    event.preventDefault();
    const token = input.value;
    input.value = "";
    useToken(token);
  };
  return h("form.notice", { onsubmit: submit }, h("p.refusal", { role: "alert" }, text), field, h("button.primary", { type: "submit" }, "Connect"));
}

on("connection", connectionPanel);
