//! The lists under "Modules" in docs/design.md against the sources: who imports from whom, and that no circle is drawn.
//!
//! Tests may import what they like: files and folders named `tests` and items under `#[cfg(test)]` are not read, nor are
//! dev-dependencies. `lib.rs` holds all modules of its crate and is none of them.

#![allow(clippy::unwrap_used, clippy::panic)]

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fs;
use std::iter::Peekable;
use std::path::{Path, PathBuf};

use proc_macro2::{Delimiter, TokenStream, TokenTree, token_stream};

const DESIGN: &str = "docs/design.md";

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

/// What one block of docs/design.md draws: each name with those that it may import from, the lowest first.
#[derive(Debug)]
struct Picture {
    rows: Vec<(String, BTreeSet<String>)>,
}

impl Picture {
    /// Reads the block that begins with a line of three backticks, `text` and the title.
    fn read(design: &str, title: &str) -> Result<Self, String> {
        let section =
            design.split("\n## Modules\n").nth(1).ok_or(format!("{DESIGN} has no \"## Modules\""))?;
        let section = section.split("\n## ").next().unwrap_or_default();
        let opening = format!("\n```text {title}\n");
        let block = section.split(&opening).nth(1).and_then(|rest| rest.split("```").next());
        let block =
            block.ok_or(format!("\"## Modules\" of {DESIGN} has no block that begins with{opening}"))?;
        let mut rows = Vec::new();
        for line in block.lines() {
            let (name, others) = line.split_once(':').ok_or(format!("{DESIGN}: no colon in {line:?}"))?;
            rows.push((name.trim().into(), others.split_whitespace().map(String::from).collect()));
        }
        Ok(Self { rows })
    }

    fn place(&self, name: &str) -> Option<usize> {
        self.rows.iter().position(|(row, _)| row == name)
    }

    /// Arrows that do not point to a line above their own, with the circle that they close.
    fn faults(&self) -> Vec<String> {
        let mut faults = Vec::new();
        for (at, (name, others)) in self.rows.iter().enumerate() {
            if self.place(name) != Some(at) {
                faults.push(format!("{name} is listed twice"));
            }
            for other in others {
                match self.place(other) {
                    None => faults.push(format!("{name} may import from {other}, which is not listed")),
                    Some(place) if place < at => {}
                    Some(_) => faults.push(match self.way(other, name) {
                        Some(way) => format!("a circle: {name} -> {}", way.join(" -> ")),
                        None => format!("{name} may import from {other}, which is listed below it"),
                    }),
                }
            }
        }
        faults
    }

    /// The shortest way along the arrows.
    fn way<'a>(&'a self, from: &'a str, to: &str) -> Option<Vec<&'a str>> {
        let (mut seen, mut ways) = (BTreeSet::new(), VecDeque::from([vec![from]]));
        while let Some(way) = ways.pop_front() {
            let last = *way.last()?;
            if last == to {
                return Some(way);
            }
            let (_, others) = &self.rows[self.place(last)?];
            for other in others.iter().filter(|other| seen.insert(other.as_str())) {
                ways.push_back(way.iter().copied().chain([other.as_str()]).collect());
            }
        }
        None
    }

    /// How the tree differs from the picture. `found` has every name, and for each arrow where it was seen.
    fn differences(&self, found: &Arrows) -> Vec<String> {
        let mut differences = Vec::new();
        for (name, others) in found {
            let Some(place) = self.place(name) else {
                let others = others.keys().cloned().collect::<Vec<_>>().join(" ");
                differences.push(format!("not listed: {name} (it imports from: {others})"));
                continue;
            };
            for (other, files) in others.iter().filter(|(other, _)| !self.rows[place].1.contains(*other)) {
                let files = files.iter().cloned().collect::<Vec<_>>().join(", ");
                differences.push(format!("not drawn: {name} -> {other}, in {files}"));
            }
        }
        for (name, others) in &self.rows {
            let Some(used) = found.get(name) else {
                differences.push(format!("listed, and not there: {name}"));
                continue;
            };
            for other in others.iter().filter(|other| !used.contains_key(*other)) {
                differences.push(format!("drawn, and not used: {name} -> {other}"));
            }
        }
        differences
    }
}

/// Each name, those it imports from, and where.
type Arrows = BTreeMap<String, BTreeMap<String, BTreeSet<String>>>;

fn design() -> String {
    fs::read_to_string(root().join(DESIGN)).unwrap()
}

fn report(what: &str, faults: &[String]) {
    assert!(faults.is_empty(), "{what}:\n  {}\n", faults.join("\n  "));
}

/// Each `crates/NAME` that has a block, and that block.
fn drawn_crates(design: &str) -> Vec<(String, Picture)> {
    let titles = design.lines().filter_map(|line| line.strip_prefix("```text crates/"));
    titles.map(|name| (name.into(), Picture::read(design, &format!("crates/{name}")).unwrap())).collect()
}

#[test]
fn modules_import_as_drawn() {
    let design = design();
    let crates = drawn_crates(&design);
    assert!(crates.iter().any(|(name, _)| name == "tensorwire"), "{DESIGN} does not draw crates/tensorwire");
    for (name, picture) in crates {
        let found = modules(&root().join("crates").join(&name).join("src"));
        report(&format!("{DESIGN} and crates/{name}/src differ"), &picture.differences(&found));
    }
}

#[test]
fn crates_depend_as_drawn() {
    let picture = Picture::read(&design(), "crates").unwrap();
    report(&format!("{DESIGN} and crates/*/Cargo.toml differ"), &picture.differences(&dependencies()));
}

#[test]
fn no_circle_is_drawn() {
    let design = design();
    let mut pictures = drawn_crates(&design);
    pictures.push(("crates".into(), Picture::read(&design, "crates").unwrap()));
    for (name, picture) in pictures {
        report(
            &format!("each line of {DESIGN} imports only from lines above it, but in {name}"),
            &picture.faults(),
        );
    }
}

// --- what the tree has ------------------------------------------------------------------------------------------------

/// The arrows between our packages, by the names of their folders.
fn dependencies() -> Arrows {
    let mut manifests = BTreeMap::new();
    for folder in fs::read_dir(root().join("crates")).unwrap().map(|entry| entry.unwrap().path()) {
        let text = fs::read_to_string(folder.join("Cargo.toml")).unwrap();
        let name = text.lines().find_map(|line| line.strip_prefix("name = ")).unwrap().trim_matches('"');
        let folder = folder.file_name().unwrap().to_str().unwrap();
        manifests.insert(name.to_string(), (folder.to_string(), text.clone()));
    }
    let mut arrows = Arrows::new();
    for (folder, text) in manifests.values() {
        let others = arrows.entry(folder.clone()).or_default();
        let mut counts = false;
        for line in text.lines() {
            if let Some(section) = line.strip_prefix('[') {
                counts = section.contains("dependencies") && !section.contains("dev-dependencies");
            }
            let name: String =
                line.chars().take_while(|c| c.is_alphanumeric() || "-_".contains(*c)).collect();
            if let Some((other, _)) = manifests.get(&name).filter(|_| counts) {
                let place = others.entry(other.clone()).or_default();
                place.insert(format!("crates/{folder}/Cargo.toml"));
            }
        }
    }
    arrows
}

/// The arrows between the modules directly below the root of a crate.
fn modules(src: &Path) -> Arrows {
    let exported = exported(&src.join("lib.rs"));
    let mut arrows = Arrows::new();
    for file in sources(src) {
        let inside = file.strip_prefix(src).unwrap().with_extension("");
        let mut path: Vec<_> = inside.iter().map(|part| part.to_str().unwrap()).collect();
        if path.last() == Some(&"mod") {
            path.pop();
        }
        let tokens: TokenStream = fs::read_to_string(&file).unwrap().parse().unwrap();
        let mut names = BTreeSet::new();
        roots(tokens, path.len(), &mut names);
        let others = arrows.entry(path[0].to_string()).or_default();
        for name in names {
            // `crate::Group` comes from the module that lib.rs took it from.
            let module = exported.get(&name).unwrap_or(&name);
            if module != path[0] {
                let place = file.strip_prefix(root()).unwrap().display().to_string();
                others.entry(module.clone()).or_default().insert(place);
            }
        }
    }
    // What is no module comes from another crate, through lib.rs.
    let names: BTreeSet<_> = arrows.keys().cloned().collect();
    for others in arrows.values_mut() {
        others.retain(|other, _| names.contains(other));
    }
    arrows
}

/// The files of a crate's modules, without tests.
fn sources(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for path in fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
        let stem = path.file_stem().unwrap().to_str().unwrap();
        if stem == "tests" || stem == "lib" || stem == "main" {
            continue;
        }
        if path.is_dir() {
            found.extend(sources(&path));
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
    found.sort();
    found
}

/// The names that lib.rs gives on, each with the first part of the path it has there.
fn exported(lib: &Path) -> BTreeMap<String, String> {
    fn leaves(tree: &syn::UseTree, first: Option<&str>, found: &mut BTreeMap<String, String>) {
        match tree {
            syn::UseTree::Path(path) => {
                let here = path.ident.to_string();
                let first = first.or(Some(&here)
                    .filter(|here| !["crate", "self"].contains(&here.as_str()))
                    .map(|s| s.as_str()));
                leaves(&path.tree, first, found);
            }
            syn::UseTree::Group(group) => group.items.iter().for_each(|item| leaves(item, first, found)),
            syn::UseTree::Name(name) => {
                let name = name.ident.to_string();
                found.insert(name.clone(), first.unwrap_or(&name).into());
            }
            syn::UseTree::Rename(rename) => {
                let name = rename.ident.to_string();
                found.insert(rename.rename.to_string(), first.unwrap_or(&name).into());
            }
            syn::UseTree::Glob(_) => panic!("lib.rs exports everything of {first:?}: name what it exports"),
        }
    }
    let mut found = BTreeMap::new();
    for item in syn::parse_file(&fs::read_to_string(lib).unwrap()).unwrap().items {
        if let syn::Item::Use(item) = item {
            leaves(&item.tree, None, &mut found);
        }
    }
    found
}

/// The names directly below the root that code asks for: `crate::name`, or `super::name` in a module `depth` deep.
fn roots(tokens: TokenStream, depth: usize, names: &mut BTreeSet<String>) {
    let mut tokens = tokens.into_iter().peekable();
    let mut module_begins = false;
    while let Some(token) = tokens.next() {
        match token {
            TokenTree::Punct(punct) if punct.as_char() == '#' => {
                let attribute = attribute(&mut tokens);
                if attribute == "cfg(test)" {
                    skip_item(&mut tokens);
                }
            }
            TokenTree::Ident(ident) if ident == "crate" => {
                let is_path = colons(&mut tokens);
                if is_path {
                    first_names(&mut tokens, names);
                }
            }
            TokenTree::Ident(ident) if ident == "super" => {
                let mut ups = 1;
                while colons(&mut tokens) {
                    if tokens
                        .next_if(|token| matches!(token, TokenTree::Ident(ident) if ident == "super"))
                        .is_some()
                    {
                        ups += 1;
                        continue;
                    }
                    if ups == depth {
                        first_names(&mut tokens, names);
                    }
                    break;
                }
            }
            TokenTree::Ident(ident) if ident == "mod" => {
                tokens.next();
                module_begins = true;
                continue;
            }
            TokenTree::Group(group) => roots(group.stream(), depth + usize::from(module_begins), names),
            _ => {}
        }
        module_begins = false;
    }
}

type Tokens = Peekable<token_stream::IntoIter>;

fn colons(tokens: &mut Tokens) -> bool {
    let is_colon = |token: &TokenTree| matches!(token, TokenTree::Punct(punct) if punct.as_char() == ':');
    tokens.next_if(is_colon).is_some() && tokens.next_if(is_colon).is_some()
}

/// What stands behind `crate::`: a name, or several in braces.
fn first_names(tokens: &mut Tokens, names: &mut BTreeSet<String>) {
    match tokens.next() {
        Some(TokenTree::Ident(ident)) => _ = names.insert(ident.to_string()),
        Some(TokenTree::Group(group)) => {
            let mut begins = true;
            for token in group.stream() {
                match token {
                    TokenTree::Ident(ident) if begins => _ = names.insert(ident.to_string()),
                    TokenTree::Punct(punct) if punct.as_char() == ',' => {
                        begins = true;
                        continue;
                    }
                    _ => {}
                }
                begins = false;
            }
        }
        _ => {}
    }
}

/// The text of an attribute whose `#` has been read, without spaces.
fn attribute(tokens: &mut Tokens) -> String {
    tokens.next_if(|token| matches!(token, TokenTree::Punct(punct) if punct.as_char() == '!'));
    match tokens.next_if(|token| matches!(token, TokenTree::Group(_))) {
        Some(TokenTree::Group(group)) => group.stream().to_string().replace(' ', ""),
        _ => String::new(),
    }
}

/// To the end of an item: its body, a semicolon, or the comma behind a field.
fn skip_item(tokens: &mut Tokens) {
    for token in tokens {
        match token {
            TokenTree::Group(group) if group.delimiter() == Delimiter::Brace => return,
            TokenTree::Punct(punct) if [';', ','].contains(&punct.as_char()) => return,
            _ => {}
        }
    }
}

// --- the test's own tests ---------------------------------------------------------------------------------------------

fn names_in(code: &str, depth: usize) -> Vec<String> {
    let mut names = BTreeSet::new();
    roots(code.parse().unwrap(), depth, &mut names);
    names.into_iter().collect()
}

#[test]
fn paths_are_found_wherever_code_has_them() {
    assert_eq!(names_in("use crate::a; use crate::{b::{c, d}, e, self as f};", 1), ["a", "b", "e", "self"]);
    assert_eq!(names_in("fn f() -> crate::a::T { g!(x, crate::b::C); }", 1), ["a", "b"]);
    assert_eq!(
        names_in(
            "pub(crate) fn f() {} // crate::a\n/* crate::b */ /// crate::c\nconst S: &str = \"crate::d\";",
            1
        ),
        [""; 0]
    );
    assert_eq!(
        names_in("#[cfg(test)] mod t { use crate::a; } #[cfg(test)] use crate::b; use crate::c;", 1),
        ["c"]
    );
    assert_eq!(names_in("use super::a; mod m { use super::b; use super::super::c; }", 1), ["a", "c"]);
    assert_eq!(names_in("use super::a; use super::super::{b, c::d};", 2), ["b", "c"]);
}

#[test]
fn a_wrong_picture_is_seen() {
    let text =
        "\n## Modules\n\n```text crates/x\na: c\nb: a\nc: b a\n```\n\n```text crates/y\na:\nb: a d\n```\n";
    let picture = Picture::read(text, "crates/x").unwrap();
    assert_eq!(picture.faults(), ["a circle: a -> c -> a"]);
    let picture = Picture::read(text, "crates/y").unwrap();
    assert_eq!(picture.faults(), ["b may import from d, which is not listed"]);
    let used = |others: &[&str]| {
        others.iter().map(|other| (other.to_string(), BTreeSet::from(["f.rs".into()]))).collect()
    };
    let found =
        Arrows::from([("a".into(), used(&["b"])), ("b".into(), used(&["a"])), ("e".into(), used(&["a"]))]);
    assert_eq!(
        picture.differences(&found),
        ["not drawn: a -> b, in f.rs", "not listed: e (it imports from: a)", "drawn, and not used: b -> d"]
    );
    assert!(Picture::read("## Words", "crates").unwrap_err().contains("no \"## Modules\""));
}
