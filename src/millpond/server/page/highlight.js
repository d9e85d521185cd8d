// Code in colours: comments, strings, numbers and the words of a language, each a span. Text goes in and text stays.

const MOST = 20000; // characters that are coloured

// Patterns try each character a bounded number of times: whatever the text, it is read in a time like its length.
const DOUBLE = '"(?:\\\\[^]|[^"\\\\\\n])*"?', SINGLE = "'(?:\\\\[^]|[^'\\\\\\n])*'?", BACK = "`(?:\\\\[^]|[^`\\\\])*`?";
const SLASHES = "//[^\\n]*|/\\*[^]*?(?:\\*/|$)", HASH = "#[^\\n]*", DASHES = "--[^\\n]*|/\\*[^]*?(?:\\*/|$)";
const NUMBER = "\\b\\d[\\w.]*", WORD = "[A-Za-z_$][\\w$]*";
const TRIPLE = '"""[^]*?(?:"""|$)|\'\'\'[^]*?(?:\'\'\'|$)';

const C_WORDS = "abstract as async await auto bool boolean break byte case catch char class const constexpr continue " +
  "default defer delete do double else enum explicit export extends extern final finally float fn for foreach friend " +
  "from func fun function go goto if impl implements import in inline instanceof int interface internal is let long " +
  "loop map match mod module mut namespace new noexcept operator out override package private protected pub public " +
  "range readonly ref return select self short signed sizeof static string struct super switch template this throw " +
  "throws trait try type typedef typename typeof uint union unsafe unsigned use using val var virtual void volatile " +
  "when where while with yield";
const PYTHON_WORDS = "and as assert async await break case class continue def del elif else except finally for from " +
  "global if import in is lambda match nonlocal not or pass raise return self try while with yield";
const SHELL_WORDS = "case do done elif else esac exit export fi for function if in local return set source sudo then " +
  "until while";
const SQL_WORDS = "add all alter and as asc begin between by case commit constraint create cross default delete desc " +
  "distinct drop else end exists foreign from full group having if in index inner insert into is join key left like " +
  "limit not null offset on or order outer primary references right rollback select set table then union unique " +
  "update values view when where with";
const VALUES = "true false null undefined nil none nan inf True False None";

const set = (words) => new Set(words.split(" "));
const values = set(VALUES);

// comments, strings: patterns. names: one of what a value belongs to. words: of the language.
const KINDS = {
  c: { comments: SLASHES, strings: `${DOUBLE}|${SINGLE}|${BACK}`, words: set(C_WORDS) },
  python: { comments: HASH, strings: `${TRIPLE}|${DOUBLE}|${SINGLE}`, words: set(PYTHON_WORDS) },
  shell: { comments: "(?<![^\\s;])#[^\\n]*", strings: `${DOUBLE}|'[^']*'?`, words: set(SHELL_WORDS) },
  sql: { comments: DASHES, strings: `${SINGLE}|${DOUBLE}`, words: set(SQL_WORDS), anyCase: true },
  json: { comments: SLASHES, strings: DOUBLE, names: '"(?:\\\\[^]|[^"\\\\\\n])*"(?=\\s{0,16}:)', words: set("") },
  yaml: { comments: "(?<!\\S)#[^\\n]*", strings: `${TRIPLE}|${DOUBLE}|${SINGLE}`, names: "[\\w.-]{1,64}(?=\\s{0,16}[:=])", words: set("") },
  css: { comments: "/\\*[^]*?(?:\\*/|$)", strings: `${DOUBLE}|${SINGLE}`, names: "[\\w-]{1,64}(?=\\s{0,16}:)", words: set("") },
  html: { comments: "<!--[^]*?(?:-->|$)", strings: `${DOUBLE}|${SINGLE}`, names: "[\\w:-]{1,64}(?==)", tags: "</?[A-Za-z][\\w:-]*|/?>", words: set("") },
  diff: { names: "@@[^\\n]*", strings: "(?<=^|\\n)\\+[^\\n]*", comments: "(?<=^|\\n)-[^\\n]*", words: set("") },
};
// What a fence may name, by kind: the server lets these names through, and no others.
export const LANGUAGES = {
  c: "c cc cpp c++ cs csharp cuda dart go golang java javascript js jsx kotlin kt php rs rust scala swift ts tsx typescript zig",
  python: "py python python3", shell: "bash console dockerfile make makefile sh shell zsh", sql: "sql", json: "json jsonc json5",
  yaml: "ini toml yaml yml", css: "css scss", html: "html svg xml", diff: "diff patch",
};
const kindOf = new Map(Object.entries(LANGUAGES).flatMap(([kind, names]) => names.split(" ").map((name) => [name, kind])));

function patternOf({ comments, strings, names, tags }) {
  const parts = { name: names, tag: tags, comment: comments, string: strings, number: NUMBER, word: WORD };
  return new RegExp(Object.entries(parts).filter(([, part]) => part).map(([name, part]) => `(?<${name}>${part})`).join("|"), "g");
}
for (const kind of Object.values(KINDS)) kind.pattern = patternOf(kind);

// The class of what was found; "": none.
function lookOf(groups, text, behind, { words, anyCase }) {
  if (groups.comment !== undefined) return "hl-comment";
  if (groups.string !== undefined) return "hl-string";
  if (groups.number !== undefined) return "hl-number";
  if (groups.tag !== undefined) return "hl-word";
  if (groups.name !== undefined) return "hl-name";
  if (words.has(anyCase ? text.toLowerCase() : text)) return "hl-word";
  if (values.has(text)) return "hl-number";
  return behind === "(" ? "hl-name" : "";
}

// The same text in a fragment, with spans where something is known of it.
export function highlighted(code, language) {
  const made = document.createDocumentFragment(), kind = KINDS[kindOf.get(language)];
  let done = 0;
  for (const found of kind && code.length <= MOST ? code.matchAll(kind.pattern) : []) {
    const look = lookOf(found.groups, found[0], code[found.index + found[0].length], kind);
    if (!look) continue;
    made.append(code.slice(done, found.index));
    made.append(Object.assign(document.createElement("span"), { className: look, textContent: found[0] }));
    done = found.index + found[0].length;
  }
  made.append(code.slice(done));
  return made;
}
