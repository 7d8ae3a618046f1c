"use strict";
// Draws the data of the page. Text from documents only ever becomes text nodes, and no attribute is named by data.
(() => {
  const data = JSON.parse(document.getElementById("rag-explain-data").textContent);
  const OPEN = 2; // sentences of a long document
  const PAIR_ROWS = data.open ? 8 : 5;
  const HINT = matchMedia("(hover: none)").matches
    ? "Tap a word to see what it met."
    : "Point at a word, or reach one with Tab and the arrow keys, to see what it met. Click or Enter keeps it.";
  const root = document.querySelector("main");

  const el = (tag, className, ...children) => {
    const node = document.createElement(tag);
    if (className) node.className = className;
    node.append(...children.filter((child) => child !== null && child !== ""));
    return node;
  };
  const signed = (value) => (value < 0 ? "−" : "+") + Math.abs(value).toFixed(4);
  const percent = (part, whole) => (whole ? (100 * Math.abs(part) / whole).toFixed(1) : "0.0") + " %";
  const num = (value, className = "") => el("span", `num ${className} ${value < 0 ? "against" : "for"}`, signed(value));
  const notices = (sentences) => sentences.map((sentence) => el("p", "notice", sentence));
  // A word keeps its own direction: an arrow between two Arabic words still points from query to document.
  const named = (text) => el("bdi", "", text);
  const largest = (values) => values.reduce((max, value) => Math.max(max, Math.abs(value)), 0);
  const sum = (values) => values.reduce((total, value) => total + value, 0);

  // The power lets weak pairs be seen beside the strongest; the legend's ramp is bent alike. A negative value differs
  // by hue and, from a tenth of the scale on, by a dotted line: colour alone never tells.
  const tint = (node, value, scale) => {
    const strength = scale ? Math.min(1, Math.abs(value) / scale) : 0;
    node.style.setProperty("--a", (strength ** 0.75).toFixed(3));
    node.classList.toggle("minus", value < 0);
    node.classList.toggle("marked", strength > 0.1);
  };

  // On a narrow screen the rows are no longer laid out as a table: the roles keep it one for a screen reader.
  const asTable = (table) => {
    for (const [selector, role] of [["thead, tbody", "rowgroup"], ["tr", "row"], ["td", "cell"], ["th[scope=row]", "rowheader"], ["th[scope=col]", "columnheader"]])
      for (const node of table.querySelectorAll(selector)) node.setAttribute("role", role);
    table.setAttribute("role", "table");
    return table;
  };

  // Code is lines of which most are indented or end in what ends a line of a program.
  const isCode = (pieces) => {
    const lines = pieces.map(([text]) => text).join("").split("\n").filter((line) => line.trim());
    return lines.length > 2 && lines.filter((line) => /^(\t| {2,})\S|[{};:,)\]]\s*$/.test(line)).length > lines.length / 2;
  };

  // How Markdown is written, character by character: the text stays as it stands, and its offsets with it.
  const MARKDOWN = [[/^```.*?^```/gms, "code"], [/^#{1,6} .*$/gm, "heading"], [/`[^`\n]+`/g, "code"], [/\*\*[^*\n]+\*\*/g, "strong"]];
  const markdown = (pieces) => {
    const text = pieces.map(([piece]) => piece).join("");
    const kinds = new Array(text.length).fill("");
    if (!/^(#{1,6} |```|\s*[-*] \S.*\n\s*[-*] )/m.test(text)) return kinds;
    for (const [pattern, kind] of MARKDOWN) for (const { 0: found, index } of text.matchAll(pattern))
      if (!kinds[index]) kinds.fill(kind, index, index + found.length);
    return kinds;
  };

  // What one explanation says, derived once from its pairs.
  const derive = (shown) => {
    const columns = shown.documentNames.map((_, j) => shown.pairs.map((row) => row[j]));
    const cells = shown.pairs.flatMap((row, i) => row.map((value, j) => ({ i, j, value })));
    cells.sort((a, b) => Math.abs(b.value) - Math.abs(a.value));
    return Object.assign(shown, {
      columns, cells,
      absolute: sum(cells.map((cell) => Math.abs(cell.value))),
      queryKey: JSON.stringify(shown.query),
    });
  };
  for (const section of data.sections) for (const card of section.cards) card.shown.forEach(derive);

  // Colours compare across all documents of the page, for each method: methods do not share a unit.
  const scales = {};
  for (const section of data.sections) for (const card of section.cards) for (const shown of card.shown) {
    const scale = (scales[shown.method] ??= { words: 0, pairs: 0, query: 0, sentences: 0 });
    scale.words = Math.max(scale.words, largest(shown.documentSums));
    scale.query = Math.max(scale.query, largest(shown.querySums));
    scale.pairs = Math.max(scale.pairs, Math.abs(shown.cells[0]?.value ?? 0));
    if (shown.sentences) scale.sentences = Math.max(scale.sentences, largest(shown.sentences.pairs.flat()));
  }

  // A stretch of text in runs of one kind each.
  const runs = (text, kinds, at) => {
    const found = [];
    for (let start = 0, end; start < text.length; start = end) {
      for (end = start + 1; end < text.length && kinds[at + end] === kinds[at + start]; end++);
      found.push(kinds[at + start] ? el("span", kinds[at + start], text.slice(start, end)) : text.slice(start, end));
    }
    return found;
  };

  const appendPieces = (target, pieces, makeWord) => {
    const words = [];
    const kinds = makeWord ? [] : markdown(pieces);
    let at = -1;
    for (const [text, token, seen, known = 1] of pieces) {
      const start = at + 1;
      at += text.length;
      if (!seen) target.append(el("span", "unseen-mark", "not read by the encoder"), el("span", "unseen", text));
      else if (token < 0) target.append(...(makeWord ? [el("span", "plain", text)] : runs(text, kinds, start)));
      else { const word = (makeWord ?? ((t) => el("span", "w tint", t)))(text, token); words[token] ??= word; word.classList.toggle("unknown", !known); if (kinds[start]) word.classList.add(kinds[start]); target.append(word); }
    }
    return words;
  };

  class Section {
    constructor(source) {
      this.method = source.methods[0] ?? "";
      this.cards = source.cards.map((card, index) => new Card(this, card, index, source.cards.length === 1));
      this.active = this.cards.find((card) => card.shown) ?? this.cards[0];
      this.hover = null; this.pinned = null;
      this.node = el("section");
      this.words = [];
      this.line = el("div", "words");
      this.line.setAttribute("dir", "auto");
      // Where words have a real change to tell, there is room for it from the beginning: nothing moves when it is shown.
      this.node.classList.toggle("what-if", source.cards.some((card) => Object.keys(card.whatIf?.query ?? {}).length));
      this.status = el("div", "status");
      this.live = el("div", "hidden");
      this.live.setAttribute("aria-live", "polite");
      this.of = el("span", "of");
      this.low = el("span", "num"); this.high = el("span", "num");
      const ramp = el("span", "ramp");
      ramp.setAttribute("aria-hidden", "true");
      const legend = el("span", "legend", this.low, ramp, this.high);
      const label = el("div", "label", el("h2", "", "Query", this.of));
      if (source.methods.length > 1) label.append(this.methodSwitch(source.methods));
      this.copy = el("button", "copy", "Copy as Markdown");
      this.copy.type = "button";
      this.copy.addEventListener("click", () => {
        const done = copied(this.markdown());
        this.copy.textContent = done ? "Copied" : "The browser forbids to copy";
        this.live.textContent = this.copy.textContent;
      });
      label.append(legend, this.copy);
      const head = el("div", "query", label, this.line, this.status, this.live);
      const cards = this.cards.flatMap((card) => (card.source.line ? [el("p", "line", card.source.line), card.node] : [card.node]));
      const about = source.about.map((line) => el("p", "about", line));
      this.node.append(...about, ...notices(source.unread), head, ...this.overview(source.overview), ...cards);
      // What sticks or scrolls into view below the query has to know how tall it is.
      new ResizeObserver(() => this.node.style.setProperty("--head", `${head.offsetHeight}px`)).observe(head);
      const sight = new IntersectionObserver((entries) => {
        for (const entry of entries) {
          const card = this.cards.find((one) => one.node === entry.target);
          card.inSight = entry.isIntersecting;
          card.paint(this.hover ?? this.pinned);
        }
      });
      for (const card of this.cards) sight.observe(card.node);
      // The numbers of the query are those of the hit that is read: the first below the query that is in sight.
      let waits = false;
      addEventListener("scroll", () => {
        if (waits || this.hover || this.cards.length < 2) return;
        waits = true;
        requestAnimationFrame(() => {
          waits = false;
          const edge = head.getBoundingClientRect().bottom + 24;
          const held = this.held?.node.getBoundingClientRect();
          if (held && held.top < innerHeight && held.bottom > edge) return; // as long as it is in sight
          this.held = null;
          const read = this.cards.find((card) => card.shown && card.node.getBoundingClientRect().bottom > edge);
          if (read && read !== this.active && !this.pinned?.card) { this.active = read; this.paint(); }
        });
      }, { passive: true });
      this.node.addEventListener("keydown", (event) => {
        if (event.key === "Escape") { this.pinned = null; this.hover = null; this.paint(); }
      });
    }

    methodSwitch(methods) {
      const group = el("fieldset", "switch", el("legend", "hidden", "Method"));
      const name = `method-${Section.count = (Section.count ?? 0) + 1}`;
      methods.forEach((method, index) => {
        const input = el("input");
        input.type = "radio"; input.name = name; input.checked = index === 0;
        input.addEventListener("change", () => {
          this.method = method; this.hover = null; this.pinned = null;
          this.cards.forEach((card) => card.draw());
          this.paint();
        });
        group.append(el("label", "", input, method));
      });
      return group;
    }

    // Hits by the words of the query: a cell is the word of the document that a word of the query met most.
    overview(grid) {
      this.grid = grid;
      if (!grid) return [];
      const head = (text, scope, className = "") => { const cell = el("th", className, named(text)); cell.scope = scope; return cell; };
      const rows = grid.rows.map((row, at) => {
        const link = el("button", "link", named(row.name));
        link.type = "button";
        link.addEventListener("click", () => this.show(at));
        const cells = row.cells.map((cell, k) => {
          const word = el("button", "tint cell", el("span", "of", named(grid.heads[k])), named(cell.text), num(cell.value), cell.note && el("span", "note", cell.note));
          word.type = "button";
          word.title = `“${grid.heads[k]}” in ${row.name}: show its pairs`;
          tint(word, cell.value, grid.scale);
          word.classList.toggle("unknown", !cell.is_known);
          word.addEventListener("click", () => this.show(at, grid.columns[k]));
          return el("td", "met", word);
        });
        if (!cells.length) { const none = el("td", "muted", "no explanation"); none.colSpan = grid.heads.length + grid.more.length; cells.push(none); }
        const name = el("th", "", link);
        name.scope = "row";
        const score = el("td", "num score", row.total);
        if (row.bar) { const bar = el("span", "bar"); bar.style.setProperty("--a", row.bar.toFixed(3)); score.prepend(bar); }
        const line = el("tr", "", el("td", "num muted", `${row.rank}`), name, score, ...cells, ...row.more.map((text) => el("td", "num muted more", text)));
        if (!row.above) return [line];
        const above = el("td", "above", row.above);
        above.colSpan = line.children.length;
        return [el("tr", "parted", above), line];
      }).flat();
      const heads = el("tr", "", el("td"), head("document", "col"), head("score", "col", "num"), ...grid.heads.map((text) => head(text, "col", "word")), ...grid.more.map((text) => head(text, "col")));
      const table = el("div", "scroll", asTable(el("table", "overview", el("thead", "", heads), el("tbody", "", ...rows))));
      table.tabIndex = 0;
      table.setAttribute("role", "region");
      table.setAttribute("aria-label", "Hits by words of the query");
      const lines = grid.said.map(([text, tone]) => el("p", { warning: "notice", muted: "muted small" }[tone] ?? "reason", text));
      return [el("div", "panel", ...lines, table)];
    }

    // What the page shows first, for a ticket or a chat: the query, why, and hits by words or the strongest pairs.
    markdown() {
      const cell = (text) => `${text}`.replace(/\s+/g, " ").replace(/[\\|`*_<>[\]]/g, "\\$&");
      const table = (heads, rows) => [heads, heads.map(() => "---"), ...rows].map((row) => `| ${row.map(cell).join(" | ")} |`.replace(/\\?-\\?-\\?-/g, "---"));
      const grid = this.grid;
      const shown = this.active?.shown;
      const lines = [`**${cell(shown ? shown.query.map(([text]) => text).join("") : "")}**`, ""];
      if (grid) {
        const heads = ["", "document", "score", ...grid.heads];
        const rows = grid.rows.map((row) => [row.rank, row.name, row.total, ...grid.heads.map((_, k) => (row.cells[k] ? `${row.cells[k].text} ${signed(row.cells[k].value)}` : ""))]);
        lines.push(...grid.said.map(([text]) => cell(text)), "", ...table(heads, rows));
      } else if (shown) {
        const pairs = shown.cells.slice(0, PAIR_ROWS).map(({ i, j, value }) => [shown.queryNames[i], shown.documentNames[j], signed(value)]);
        lines.push(`${cell(this.active.title)}: ${shown.score.toFixed(4)}; ${cell(shown.balance)}`, "", ...table(["query", "document", shown.units], pairs));
      }
      return `${lines.join("\n")}\n`;
    }

    // Goes to a hit, and keeps the pairs of a word of the query there.
    show(at, word) {
      const card = this.cards[at];
      this.active = this.held = card;
      if (word !== undefined) this.pinned = { side: "query", index: word };
      this.hover = null;
      this.paint();
      card.node.scrollIntoView({ block: "start", behavior: matchMedia("(prefers-reduced-motion: reduce)").matches ? "auto" : "smooth" });
      card.node.focus({ preventScroll: true });
      this.address();
      this.live.textContent = this.status.textContent;
    }

    // What is kept is in the address, so that a link to the page leads to it.
    address() {
      const kept = this.pinned?.side === "query" ? [["word", this.active.shown.queryNames[this.pinned.index]]] : [];
      const parts = new URLSearchParams([...(this.active?.source.rank ? [["hit", this.active.source.rank]] : []), ...kept]);
      history.replaceState(null, "", `#${parts}`);
    }

    // The query is drawn again only when its words are other words.
    drawQuery(shown) {
      if (this.key === shown.queryKey) return;
      this.key = shown.queryKey;
      this.line.replaceChildren();
      this.words = appendPieces(this.line, shown.query, (text, index) => {
        const word = el("button", "tint", el("span", "word", text), el("span", "num", ""));
        word.type = "button";
        const here = { side: "query", index };
        word.addEventListener("pointerenter", (event) => { if (event.pointerType === "mouse") this.look(here); });
        word.addEventListener("pointerleave", () => this.look(null));
        word.addEventListener("focus", () => { if (word.matches(":focus-visible")) this.look(here, true); });
        word.addEventListener("blur", () => this.look(null));
        word.addEventListener("click", () => this.pin(here));
        return word;
      });
      this.line.classList.toggle("many", this.words.length > 24);
    }

    look(target, speak = false) {
      this.hover = target;
      if (target?.card) this.active = target.card;
      this.paint();
      if (speak) this.live.textContent = this.status.textContent;
    }

    pin(target) {
      const same = this.pinned && this.pinned.side === target.side && this.pinned.index === target.index && this.pinned.card === target.card;
      this.pinned = same ? null : target;
      if (target.card) this.active = target.card;
      this.hover = null;
      this.paint();
      this.address();
      this.live.textContent = this.status.textContent;
    }

    paint() {
      const target = this.hover ?? this.pinned;
      const shown = this.active?.shown;
      for (const card of this.cards) {
        card.node.classList.toggle("active", this.cards.length > 1 && card === this.active);
        card.paint(target);
      }
      if (!shown) return;
      this.drawQuery(shown);
      this.of.replaceChildren(...(this.cards.length > 1 ? [" in ", named(this.active.title)] : []));
      const scale = scales[shown.method];
      const onWord = target && target.side === "document";
      const values = onWord ? shown.columns[target.index] : shown.querySums;
      this.words.forEach((word, i) => {
        const dimmed = target && target.side === "query" && target.index !== i;
        tint(word, dimmed ? 0 : values[i], onWord ? scale.pairs : scale.query);
        word.lastChild.textContent = signed(values[i]);
        word.classList.toggle("on", Boolean(target) && (target.side === "query" ? target.index === i : target.other === i));
        word.setAttribute("aria-pressed", String(this.pinned?.side === "query" && this.pinned.index === i));
      });
      const reach = target ? scale.pairs : scale.words;
      this.low.textContent = signed(-reach);
      this.high.textContent = `${signed(reach)} ${shown.units}`;
      this.status.replaceChildren(...this.tell(target, shown));
    }

    tell(target, shown) {
      if (!target) return [HINT];
      const bold = (text) => el("b", "", named(text));
      if (target.other !== undefined) {
        const value = shown.pairs[target.other][target.index];
        const cosine = shown.similarities ? `, cosine ${shown.similarities[target.other][target.index].toFixed(3)}` : "";
        return [bold(shown.queryNames[target.other]), " met ", bold(shown.documentNames[target.index]), ": ", num(value),
          ` ${shown.units}, ${percent(value, shown.absolute)} of all pairs${cosine}`];
      }
      const query = target.side === "query";
      const values = query ? shown.pairs[target.index] : shown.columns[target.index];
      const others = query ? shown.documentNames : shown.queryNames;
      const best = values.map((value, k) => [value, k]).sort((a, b) => Math.abs(b[0]) - Math.abs(a[0])).slice(0, 3);
      const parts = [bold((query ? shown.queryNames : shown.documentNames)[target.index]), " carries ", num((query ? shown.querySums : shown.documentSums)[target.index]), ` ${shown.units}; met `];
      best.forEach(([value, k], rank) => parts.push(rank ? ", " : "", named(others[k]), " ", num(value)));
      const words = query ? this.words : this.active.words;
      if (words[target.index]?.classList.contains("unknown")) parts.push(" – unknown to this encoder, which takes all such words for one: no match");
      const real = this.active?.source.whatIf?.[target.side][target.index];
      if (real) parts.splice(3, 1, ` ${shown.units}; `, el("span", "real", real), "; met ");
      return parts;
    }
  }

  class Card {
    constructor(section, source, index, only) {
      this.section = section; this.source = source; this.index = index; this.only = only;
      this.node = el("article", "card");
      this.node.tabIndex = -1;
      this.draw();
    }

    draw() {
      const { source, section } = this;
      this.tinted = undefined;
      this.shown = source.shown.find((one) => one.method === section.method) ?? source.shown[0];
      this.title = source.title || (this.only ? "Document" : `Document ${this.index + 1}`);
      const title = el("h3", "", source.rank ? el("span", "rank", `${source.rank}`) : "", this.title);
      title.setAttribute("dir", "auto");
      const head = el("header", "", title);
      if (source.facts) head.append(el("span", "facts", source.facts));
      this.node.replaceChildren(head);
      if (source.stages) this.node.append(...this.stages());
      this.words = [];
      if (!this.shown) {
        this.node.append(...notices([source.missing]));
        const text = el("p", "text muted", source.text);
        text.setAttribute("dir", "auto");
        this.node.append(text);
        return;
      }
      this.node.append(...notices(this.shown.unread), this.sums(), ...notices(this.shown.notices));
      const columns = el("div", "columns", this.document(), this.pairTable());
      this.node.append(columns);
      const grid = this.shown.sentences ? this.sentenceGrid() : this.wordGrid();
      if (grid) this.node.append(grid);
      if (this.shown.terms) this.node.append(this.termTable());
    }

    sums() {
      const { shown } = this;
      const list = el("dl");
      const entry = (className, name, value) => list.append(el("div", className, el("dt", "", name), el("dd", "", value)));
      entry("total", shown.measure === "logit" ? "logit" : "score", el("span", "num", shown.score.toFixed(4)));
      if (shown.additive) {
        entry("", `${shown.unit}s`, num(shown.score - shown.unattributed));
        entry("", `no ${shown.unit}`, num(shown.unattributed));
      }
      return el("div", "sum", list, shown.returned ? el("span", "check", shown.returned) : "", this.check(), el("span", "check", shown.source), shown.trust ? el("span", "check trust", shown.trust) : "");
    }

    check() {
      const { checked, balance } = this.shown;
      const node = el("span", "check", checked ? "checked ✓" : balance, checked ? el("span", "hidden", ` ${balance}`) : "");
      node.title = balance;
      return node;
    }

    document() {
      const text = el("p", isCode(this.shown.document) ? "text source" : "text");
      text.setAttribute("dir", "auto");
      text.setAttribute("role", "group");
      text.setAttribute("aria-label", "Document: the arrow keys move from word to word");
      this.words = appendPieces(text, this.shown.document);
      if (this.shown.sentences?.texts.length > OPEN + 2) this.fold(text);
      this.reach();
      const at = (node) => this.words.indexOf(node.closest?.(".w"));
      text.addEventListener("pointerover", (event) => {
        if (event.pointerType !== "mouse") return;
        const index = at(event.target);
        if (index >= 0) this.section.look({ card: this, side: "document", index });
      });
      text.addEventListener("pointerleave", () => this.section.look(null));
      text.addEventListener("click", (event) => {
        const index = at(event.target);
        if (index >= 0) { this.rove(index, false); this.section.pin({ card: this, side: "document", index }); }
      });
      text.addEventListener("focusin", (event) => {
        this.column = undefined;
        const index = at(event.target);
        if (index >= 0 && event.target.matches(":focus-visible")) this.section.look({ card: this, side: "document", index }, true);
      });
      text.addEventListener("focusout", () => this.section.look(null));
      text.addEventListener("keydown", (event) => this.key(event, at(event.target)));
      return text;
    }

    // Of a long document what carries most is open, and the rest folded.
    fold(text) {
      const { first, sums, texts } = this.shown.sentences;
      const open = sums.map((value, s) => [value, s]).sort((a, b) => b[0] - a[0]).slice(0, OPEN).map(([, s]) => s);
      const all = [...text.childNodes];
      const nodes = all.filter((node) => !node.classList?.contains("unseen") && !node.classList?.contains("unseen-mark"));
      const begins = first.map((index) => nodes.indexOf(this.words[index]));
      begins[0] = 0; // what was not read is never folded: it must be seen that it was not
      for (let s = 0, end; s < texts.length; s = end) {
        for (end = s + 1; end < texts.length && open.includes(end) === open.includes(s); end++);
        if (open.includes(s)) continue;
        const inner = nodes.slice(begins[s], end < texts.length ? begins[end] : nodes.length);
        const folded = el("span", "folded");
        inner[0].before(folded);
        folded.append(...inner);
        const button = el("button", "fold", `… ${end - s} sentence${end - s > 1 ? "s" : ""}`);
        button.type = "button";
        const toggle = (isOpen) => { folded.hidden = !isOpen; button.setAttribute("aria-expanded", String(isOpen)); };
        button.addEventListener("click", () => { toggle(folded.hidden); this.reach(); });
        toggle(false);
        folded.before(button);
      }
    }

    // The words that the arrow keys move between, and the one that Tab comes to.
    reach() {
      const seen = (word) => word && !word.closest(".folded[hidden]");
      this.order = this.words.map((word, index) => index).filter((index) => seen(this.words[index]));
      const focus = this.order.find((index) => this.words[index].tabIndex === 0) ?? this.order[0];
      this.words.forEach((word) => word.removeAttribute("tabindex"));
      if (focus !== undefined) this.words[focus].tabIndex = 0;
    }

    key(event, index) {
      if (index < 0) return;
      const place = this.order.indexOf(index);
      const ahead = getComputedStyle(this.words[index].parentNode).direction === "rtl" ? -1 : 1;
      const lines = { ArrowDown: 1, ArrowUp: -1 }[event.key];
      const next = {
        ArrowRight: () => this.order[place + ahead], ArrowLeft: () => this.order[place - ahead],
        Home: () => this.order[0], End: () => this.order.at(-1),
      }[event.key];
      if (lines) {
        event.preventDefault();
        const from = this.box(index);
        const column = this.column ?? (from.left + from.right) / 2;
        this.rove(this.wordAt(from, lines, column) ?? index, true, column);
      } else if (next) {
        event.preventDefault();
        this.rove(next() ?? index, true);
      } else if (event.key === "Enter" || event.key === " ") {
        event.preventDefault();
        this.section.pin({ card: this, side: "document", index });
      }
    }

    // Where a word begins: one that is wrapped has a box on each of its lines.
    box(index) { return this.words[index].getClientRects()[0]; }

    // The word at the column on the nearest line below or above. Words of one line have the same top.
    wordAt(from, direction, column) {
      const same = from.height / 4;
      const step = (box) => (box.top - from.top) * direction;
      const words = this.order.map((index) => ({ index, box: this.box(index) })).filter(({ box }) => step(box) > same);
      const next = Math.min(...words.map(({ box }) => step(box))) + same;
      let best, distance = Infinity;
      for (const { index, box } of words) {
        if (step(box) > next) continue;
        const beside = Math.max(box.left - column, column - box.right);
        const far = beside > 0 ? 1e5 + beside : Math.abs((box.left + box.right) / 2 - column);
        if (far < distance) { distance = far; best = index; }
      }
      return best;
    }

    // `column` is where the arrows up and down aim, as in an editor: it outlives short lines, and any other way to
    // reach a word ends it.
    rove(index, focus, column) {
      for (const other of this.order) if (other !== index) this.words[other].removeAttribute("tabindex");
      this.words[index].tabIndex = 0;
      if (focus) this.words[index].focus();
      this.column = column;
    }

    pairTable() {
      const { shown } = this;
      this.caption = el("caption", "");
      const heads = [["what", `query → document`], ["value", shown.units], ["share", "of all"]].map(([name, text]) => {
        const head = el("th", name, text);
        head.scope = "col";
        if (name === "share") head.title = "of the sum of |pairs|, of all pairs";
        return head;
      });
      this.body = el("tbody");
      this.rows = Array.from({ length: PAIR_ROWS }, () => {
        const row = el("tr", "", el("td", "what", ""), el("td", "value num"), el("td", "share num"));
        row.addEventListener("pointerenter", () => {
          if (row.cell) this.section.look({ card: this, side: "document", index: row.cell.j, other: row.cell.i });
        });
        row.addEventListener("pointerleave", () => this.section.look(null));
        this.body.append(row);
        return row;
      });
      this.others = el("td", "others");
      this.others.colSpan = 3;
      const foot = el("tfoot", "", el("tr", "", this.others));
      return el("table", "pairs", this.caption, el("thead", "", el("tr", "", ...heads)), this.body, foot);
    }

    fillPairs(title, cells) {
      this.caption.replaceChildren(...title);
      const scale = scales[this.shown.method].pairs;
      const shown = cells.filter((cell) => cell.value);
      this.rows.forEach((row, k) => {
        const cell = shown[k];
        row.cell = cell;
        const [what, value, part] = row.children;
        row.classList.toggle("minus", Boolean(cell) && cell.value < 0);
        what.style.setProperty("--a", cell && scale ? Math.min(1, Math.abs(cell.value) / scale).toFixed(3) : "0");
        if (!cell) { for (const node of row.children) node.replaceChildren(); return; }
        what.replaceChildren(named(this.shown.queryNames[cell.i]), el("span", "arrow", "→"), named(this.shown.documentNames[cell.j]));
        value.replaceChildren(num(cell.value));
        part.textContent = percent(cell.value, this.shown.absolute);
      });
      const others = cells.slice(PAIR_ROWS);
      const share = percent(sum(others.map((cell) => Math.abs(cell.value))), this.shown.absolute);
      this.others.textContent = others.length ? `${others.length} other${others.length > 1 ? "s" : ""}: ${share}` : "";
    }

    wordGrid() {
      const { shown } = this;
      if (!shown.pairs.length || !shown.documentNames.length || shown.cells.length > 3000) return null;
      const scale = scales[shown.method].pairs;
      const rows = () => shown.pairs.map((values, i) => this.gridRow(shown.queryNames[i], values, scale, (j) => ({ i, j })));
      return this.grid(`Every pair (${shown.queryNames.length} × ${shown.documentNames.length} ${shown.unit}s)`, shown.documentNames, rows);
    }

    sentenceGrid() {
      const { shown } = this;
      const { pairs, texts, sums } = shown.sentences;
      const scale = scales[shown.method].sentences;
      const rows = () => texts.map((text, s) => {
        const values = pairs.map((row) => row[s]);
        const row = this.gridRow(null, values, scale, null);
        const total = el("td", "sum-cell", num(sums[s]));
        const body = el("td", "sentence", text);
        body.setAttribute("dir", "auto");
        row.prepend(total);
        row.append(body);
        return row;
      });
      return this.grid(`By sentence (${texts.length} sentences)`, ["all", ...shown.queryNames, "sentence"], rows);
    }

    termTable() {
      const { title } = this.shown.terms;
      return this.folded(title, title, this.shown.terms);
    }

    stages() {
      const { rows, notes } = this.source.stages;
      const table = this.folded(`Stages (${rows.length})`, "Stages", this.source.stages, "stages");
      return [table, ...notes.map((note) => el("p", "muted", note))];
    }

    folded(title, label, { heads, rows }, className = "") {
      const kind = (k) => (heads[k][1] ? "num" : "");
      const head = el("tr", "", ...heads.map(([name], k) => {
        const cell = el("th", kind(k), name);
        cell.scope = "col";
        return cell;
      }));
      const body = rows.map((row) => el("tr", "", ...row.map((text, k) => el("td", kind(k), text))));
      const scroll = el("div", "scroll", el("table", `terms ${className}`.trim(), el("thead", "", head), el("tbody", "", ...body)));
      scroll.tabIndex = 0;
      scroll.setAttribute("role", "region");
      scroll.setAttribute("aria-label", label);
      const details = el("details", "", el("summary", "", title), scroll);
      details.open = true;
      return details;
    }

    gridRow(name, values, scale, cellOf) {
      const row = el("tr");
      if (name !== null) {
        const head = el("th", "", name);
        head.scope = "row";
        row.append(head);
      }
      values.forEach((value, j) => {
        const cell = el("td", "tint", el("span", "hidden", signed(value)));
        tint(cell, value, scale);
        const where = cellOf?.(j);
        if (where) {
          cell.addEventListener("pointerenter", () => this.section.look({ card: this, side: "document", index: where.j, other: where.i }));
          cell.addEventListener("pointerleave", () => this.section.look(null));
        } else cell.title = signed(value);
        row.append(cell);
      });
      return row;
    }

    // Drawn when it is first opened: many closed tables would make a long list slow.
    grid(title, heads, rows) {
      const details = el("details", "", el("summary", "", title));
      details.addEventListener("toggle", () => details.append(this.table(title, heads, rows())), { once: true });
      details.open = data.open;
      return details;
    }

    table(title, heads, rows) {
      const byWord = !this.shown.sentences;
      const line = el("tr", "", ...(byWord ? [el("td")] : []), ...heads.map((name) => {
        // Letters that stand upright in a vertical line are not turned.
        const head = el("th", "", el("span", /[\p{sc=Han}\p{sc=Hiragana}\p{sc=Katakana}\p{sc=Hangul}]/u.test(name) ? "upright" : "", name));
        head.scope = "col";
        return head;
      }));
      const table = el("table", byWord ? (heads.length > 36 ? "grid dense" : "grid") : "grid sentences", el("thead", "", line), el("tbody", "", ...rows));
      const scroll = el("div", "scroll", asTable(table));
      scroll.tabIndex = 0;
      scroll.setAttribute("role", "region");
      scroll.setAttribute("aria-label", title);
      return scroll;
    }

    paint(target) {
      const { shown, section } = this;
      if (!shown) return;
      const scale = scales[shown.method];
      const mine = target && (target.card ? target.card === this : shown.queryKey === section.key);
      const byQuery = mine && target.side === "query";
      const onWord = mine && target.side === "document";
      const tinted = byQuery ? target.index : "all";
      // What is out of sight is tinted when it comes into sight: with many documents that is most of them.
      if (this.tinted !== undefined && !this.inSight) return;
      if (this.tinted !== tinted) {
        this.tinted = tinted;
        const values = byQuery ? shown.pairs[target.index] : shown.documentSums;
        this.words.forEach((word, j) => tint(word, values[j], byQuery ? scale.pairs : scale.words));
      }
      this.marked?.classList.remove("on");
      this.marked = onWord ? this.words[target.index] : null;
      this.marked?.classList.add("on");
      if (target?.other !== undefined) return;
      if (byQuery) this.fillPairs(["Pairs of “", named(shown.queryNames[target.index]), "”"], shown.cells.filter((cell) => cell.i === target.index));
      else if (onWord) this.fillPairs(["Pairs of “", named(shown.documentNames[target.index]), "”"], shown.cells.filter((cell) => cell.j === target.index));
      else this.fillPairs(["Strongest pairs"], shown.cells);
    }
  }

  // Without the clipboard's own interface, which asks for permission and is not there everywhere.
  const copied = (text) => {
    addEventListener("copy", (event) => { event.clipboardData.setData("text/plain", text); event.preventDefault(); }, { once: true });
    return document.execCommand("copy");
  };

  const sections = data.sections.map((source) => {
    const section = new Section(source);
    root.insertBefore(section.node, root.querySelector("footer"));
    section.paint();
    return section;
  });
  const asked = new URLSearchParams(location.hash.slice(1));
  for (const section of asked.size ? sections : []) {
    const at = section.cards.findIndex((card) => card.shown && String(card.source.rank ?? "") === (asked.get("hit") ?? ""));
    if (at < 0) continue;
    const word = section.cards[at].shown.queryNames.indexOf(asked.get("word"));
    section.show(at, word < 0 ? undefined : word);
    break;
  }
})();
