//! The public items of `tensorwire` and `tensorwire-device` against the lists in crates/*/public-items.txt, so that a
//! change of what users see is seen by the one who makes it. `UPDATE=1 cargo test -p tensorwire --test public_items`
//! writes the lists anew.
//!
//! The sources are read as syntax, from `lib.rs` on along `pub mod` and `pub use`. Items that are hidden from the
//! documentation are left out. An enum that a macro declares is listed as the call of the macro. What only the compiler
//! knows is not seen: `Send` and `Sync`, and implementations that macros write.

#![allow(clippy::unwrap_used, clippy::panic)]

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::{env, fs};

use proc_macro2::{TokenStream, TokenTree};
use quote::ToTokens;
use syn::{Attribute, Fields, ImplItem, Item, TraitItem, UseTree, Visibility};

#[test]
fn tensorwire_has_the_listed_items() {
    compare("tensorwire", "tensorwire");
}

#[test]
fn tensorwire_device_has_the_listed_items() {
    compare("device", "tensorwire_device");
}

fn compare(folder: &str, name: &str) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().join(folder);
    let found: BTreeSet<String> = Tree::read(&folder.join("src/lib.rs")).public(name);
    let list = folder.join("public-items.txt");
    if env::var_os("UPDATE").is_some() {
        return fs::write(list, found.iter().map(|line| format!("{line}\n")).collect::<String>()).unwrap();
    }
    let listed: BTreeSet<String> =
        fs::read_to_string(&list).unwrap_or_default().lines().map(String::from).collect();
    let gone = listed.difference(&found).map(|line| format!("- {line}\n"));
    let new = found.difference(&listed).map(|line| format!("+ {line}\n"));
    let changes: String = gone.chain(new).collect();
    assert!(
        changes.is_empty(),
        "public items of {name} have changed:\n{changes}\nIf that is meant, write the list anew, and say in \
         CHANGELOG.md what users have to change:\n  UPDATE=1 cargo test -p tensorwire --test public_items\n"
    );
}

// --- the modules of a crate -------------------------------------------------------------------------------------------

/// The names of the modules from the root to one; the root's is empty.
type Place = Vec<String>;

#[derive(Default)]
struct Tree {
    modules: BTreeMap<Place, Vec<Item>>,
    /// Modules that users can name.
    reachable: BTreeSet<Place>,
    /// What is implemented for a type or a trait, by the module that declares it.
    members: BTreeMap<(Place, String), Vec<String>>,
}

/// What a path leads to.
enum Target {
    Module(Place),
    Item(Place, String),
    Elsewhere,
}

impl Tree {
    fn read(lib: &Path) -> Self {
        let mut tree = Self::default();
        let items = syn::parse_file(&fs::read_to_string(lib).unwrap()).unwrap().items;
        tree.add(Vec::new(), true, items, lib.parent().unwrap());
        for place in tree.modules.keys() {
            for item in &tree.modules[place] {
                if let Item::Impl(block) = item
                    && is_there(&block.attrs)
                    && let Some((owner, lines)) = tree.implemented(place, block)
                {
                    tree.members.entry(owner).or_default().extend(lines);
                }
            }
        }
        tree
    }

    /// Keeps a module and reads those inside it; the files of the latter lie in `folder`.
    fn add(&mut self, place: Place, reachable: bool, items: Vec<Item>, folder: &Path) {
        if reachable {
            self.reachable.insert(place.clone());
        }
        for item in &items {
            let Item::Mod(module) = item else { continue };
            if !is_there(&module.attrs) {
                continue;
            }
            let name = module.ident.to_string();
            let inside = folder.join(&name);
            let items = match &module.content {
                Some((_, items)) => items.clone(),
                None => syn::parse_file(&fs::read_to_string(source(&inside)).unwrap()).unwrap().items,
            };
            let place = place.iter().cloned().chain([name]).collect();
            let public = reachable && is_public(&module.vis) && !is_hidden(&module.attrs);
            self.add(place, public, items, &inside);
        }
        self.modules.insert(place, items);
    }

    /// Where a path leads that is written in a module.
    fn resolve(&self, from: &Place, path: &[String]) -> Target {
        let Some((first, rest)) = path.split_first() else { return Target::Module(from.clone()) };
        match first.as_str() {
            "crate" => return self.resolve(&Vec::new(), rest),
            "self" => return self.resolve(from, rest),
            "super" => return self.resolve(&from[..from.len() - 1].to_vec(), rest),
            _ => {}
        }
        let child: Place = from.iter().cloned().chain([first.clone()]).collect();
        if self.modules.contains_key(&child) {
            return self.resolve(&child, rest);
        }
        if self.declared(from, first).is_some() {
            return Target::Item(from.clone(), first.clone());
        }
        for item in self.modules[from].iter() {
            let Item::Use(item) = item else { continue };
            for (name, whole) in leaves(&item.tree) {
                // A name that stands for itself comes from another crate.
                if name == *first && whole[0] != *first {
                    return self.resolve(from, &[whole, rest.to_vec()].concat());
                }
            }
        }
        Target::Elsewhere
    }

    /// The item of that name, or the call of a macro that declares it.
    fn declared(&self, place: &Place, name: &str) -> Option<&Item> {
        self.modules[place].iter().find(|item| match item {
            Item::Const(item) => item.ident == name,
            Item::Enum(item) => item.ident == name,
            Item::Fn(item) => item.sig.ident == name,
            Item::Static(item) => item.ident == name,
            Item::Struct(item) => item.ident == name,
            Item::Trait(item) => item.ident == name,
            Item::Type(item) => item.ident == name,
            Item::Union(item) => item.ident == name,
            Item::Macro(item) => {
                let mut tokens = item.mac.tokens.clone().into_iter();
                item.ident.is_none()
                    && tokens.any(|token| matches!(token, TokenTree::Ident(ident) if ident == name))
            }
            _ => false,
        })
    }

    /// The lines of an `impl` block, and whose they are.
    fn implemented(&self, place: &Place, block: &syn::ItemImpl) -> Option<((Place, String), Vec<String>)> {
        let owner = |path: &syn::Path| {
            let names: Vec<_> = path.segments.iter().map(|segment| segment.ident.to_string()).collect();
            match self.resolve(place, &names) {
                Target::Item(place, name) => Some((place, name)),
                _ => None,
            }
        };
        let own = match &*block.self_ty {
            syn::Type::Path(path) => owner(&path.path),
            _ => None,
        };
        let Some((path, _)) = &block.trait_ else {
            let lines = block.items.iter().filter_map(|item| match item {
                ImplItem::Fn(item) if is_public(&item.vis) => line(&item.attrs, &item.sig),
                ImplItem::Const(item) if is_public(&item.vis) => {
                    line(&item.attrs, format!("const {}: {}", item.ident, text(&item.ty)))
                }
                _ => None,
            });
            return Some((own?, lines.collect()));
        };
        let name = text(path.segments.last()?);
        match own {
            Some(own) => Some((own, vec![format!("impl {name}")])),
            // Ours for a type of another crate.
            None => Some((owner(path)?, vec![format!("impl for {}", text(&block.self_ty))])),
        }
    }
}

// --- what of it is public ---------------------------------------------------------------------------------------------

#[derive(Default)]
struct List {
    /// The crate's.
    name: String,
    lines: BTreeSet<String>,
    /// Items of modules that users cannot name, and where they are listed instead.
    given: BTreeMap<(Place, String), String>,
}

impl Tree {
    fn public(&self, name: &str) -> BTreeSet<String> {
        let mut list = List { name: name.into(), ..List::default() };
        self.list_module(&Vec::new(), name, &mut list);
        list.lines
    }

    fn list_module(&self, place: &Place, shown: &str, list: &mut List) {
        // What is inside comes first: what is given on from there is then listed there.
        let (uses, others): (Vec<_>, Vec<_>) =
            self.modules[place].iter().partition(|item| matches!(item, Item::Use(_)));
        for item in others.into_iter().chain(uses) {
            match item {
                Item::Mod(module) if is_public(&module.vis) && is_listed(&module.attrs) => {
                    let child = place.iter().cloned().chain([module.ident.to_string()]).collect();
                    list.lines.insert(format!("{shown}: mod {}", module.ident));
                    self.list_module(&child, &format!("{shown}::{}", module.ident), list);
                }
                Item::Use(item) if is_public(&item.vis) && is_listed(&item.attrs) => {
                    for (name, path) in leaves(&item.tree) {
                        self.list_use(place, &name, &path, shown, list);
                    }
                }
                item => self.list_item(place, item, None, shown, list),
            }
        }
    }

    /// What `pub use` gives: its path if it is listed there, else all of it.
    fn list_use(&self, from: &Place, name: &str, path: &[String], shown: &str, list: &mut List) {
        let (all, path) = match path.split_last() {
            Some((last, before)) if last == "*" => (true, before),
            _ => (false, path),
        };
        let there = |place: &Place| [std::slice::from_ref(&list.name), place].concat().join("::");
        let line = match self.resolve(from, path) {
            Target::Module(place) if all => return self.list_module(&place, shown, list),
            Target::Module(place) if self.reachable.contains(&place) => {
                format!("{} as {name}", there(&place))
            }
            Target::Module(place) => return self.list_module(&place, &format!("{shown}::{name}"), list),
            Target::Item(place, item) if self.reachable.contains(&place) => {
                format!("{}::{item}{}", there(&place), renamed(&item, name))
            }
            Target::Item(place, item) => match list.given.get(&(place.clone(), item.clone())) {
                Some(there) => format!("{there}{}", renamed(there.rsplit("::").next().unwrap(), name)),
                None => {
                    let declared = self.declared(&place, &item).unwrap();
                    self.list_item(&place, declared, Some((&item, name)), shown, list);
                    list.given.insert((place, item), format!("{shown}::{name}"));
                    return;
                }
            },
            Target::Elsewhere if all => format!("{}::*", path.join("::")),
            Target::Elsewhere => format!("{}{}", path.join("::"), renamed(path.last().unwrap(), name)),
        };
        list.lines.insert(format!("{shown}: use {line}"));
    }

    /// One item and its members. `used` is its name, and the one under which it is given on.
    fn list_item(
        &self,
        place: &Place,
        item: &Item,
        used: Option<(&str, &str)>,
        shown: &str,
        list: &mut List,
    ) {
        let own;
        let mut members = Vec::new();
        let name = match item {
            Item::Const(item) if is_public(&item.vis) => {
                own = line(&item.attrs, format!("const {}: {}", item.ident, text(&item.ty)));
                &item.ident
            }
            Item::Static(item) if is_public(&item.vis) => {
                own = line(&item.attrs, format!("static {}: {}", item.ident, text(&item.ty)));
                &item.ident
            }
            Item::Type(item) if is_public(&item.vis) => {
                let (generics, ty) = (text(&item.generics), text(&item.ty));
                own = line(&item.attrs, format!("type {}{generics} = {ty}", item.ident));
                &item.ident
            }
            Item::Fn(item) if is_public(&item.vis) => {
                own = line(&item.attrs, &item.sig);
                &item.sig.ident
            }
            Item::Struct(item) if is_public(&item.vis) => {
                let closed = item.fields.iter().any(|field| !is_public(&field.vis));
                let closed = if closed { " { .. }" } else { "" };
                own = line(&item.attrs, format!("struct {}{}{closed}", item.ident, text(&item.generics)));
                members.extend(derived(&item.attrs));
                for (at, field) in item.fields.iter().enumerate().filter(|(_, field)| is_public(&field.vis)) {
                    let name = field.ident.as_ref().map_or(at.to_string(), ToString::to_string);
                    members.extend(line(&field.attrs, format!("field {name}: {}", text(&field.ty))));
                }
                &item.ident
            }
            Item::Enum(item) if is_public(&item.vis) => {
                own = line(&item.attrs, format!("enum {}{}", item.ident, text(&item.generics)));
                members.extend(derived(&item.attrs));
                for variant in &item.variants {
                    members.extend(line(
                        &variant.attrs,
                        format!("variant {}{}", variant.ident, fields(&variant.fields)),
                    ));
                }
                &item.ident
            }
            Item::Trait(item) if is_public(&item.vis) => {
                let above = if item.supertraits.is_empty() {
                    String::new()
                } else {
                    format!(": {}", text(&item.supertraits))
                };
                own = line(&item.attrs, format!("trait {}{}{above}", item.ident, text(&item.generics)));
                members.extend(item.items.iter().filter_map(|item| match item {
                    TraitItem::Fn(item) => {
                        let body = if item.default.is_some() { " { .. }" } else { "" };
                        line(&item.attrs, format!("{}{body}", text(&item.sig)))
                    }
                    TraitItem::Const(item) => {
                        line(&item.attrs, format!("const {}: {}", item.ident, text(&item.ty)))
                    }
                    TraitItem::Type(item) => line(&item.attrs, format!("type {}", item.ident)),
                    _ => None,
                }));
                &item.ident
            }
            Item::Macro(call) if used.is_some() => {
                own = line(
                    &call.attrs,
                    format!("{}! {{ {} }}", text(&call.mac.path), text(bare(call.mac.tokens.clone()))),
                );
                &syn::parse_str(used.unwrap().0).unwrap()
            }
            _ => return,
        };
        let Some(own) = own else { return };
        let renamed = used.map_or(String::new(), |(name, other)| renamed(name, other));
        list.lines.insert(format!("{shown}: {own}{renamed}"));
        members.extend(self.members.get(&(place.clone(), name.to_string())).into_iter().flatten().cloned());
        let name = used.map_or(name.to_string(), |(_, other)| other.into());
        list.lines.extend(members.iter().map(|member| format!("{shown}::{name}: {member}")));
    }
}

/// A line, unless its item is hidden, with the attributes that users notice.
fn line(attributes: &[Attribute], declaration: impl ToText) -> Option<String> {
    let noticed = attributes.iter().filter(|attribute| {
        ["must_use", "non_exhaustive", "deprecated"].iter().any(|name| attribute.path().is_ident(name))
    });
    let noticed: String = noticed.map(|attribute| format!("#[{}] ", text(attribute.path()))).collect();
    is_listed(attributes).then(|| format!("{noticed}{}", declaration.to_text()))
}

fn renamed(item: &str, name: &str) -> String {
    if item == name { String::new() } else { format!(" as {name}") }
}

fn derived(attributes: &[Attribute]) -> Vec<String> {
    let mut names = Vec::new();
    for attribute in attributes.iter().filter(|attribute| attribute.path().is_ident("derive")) {
        let _ = attribute.parse_nested_meta(|meta| {
            names.extend(meta.path.segments.last().map(|last| format!("impl {}", last.ident)));
            Ok(())
        });
    }
    names
}

/// The fields of a variant.
fn fields(fields: &Fields) -> String {
    let texts: Vec<_> = fields
        .iter()
        .map(|field| {
            field.ident.iter().map(|name| format!("{name}: ")).chain([text(&field.ty)]).collect::<String>()
        })
        .collect();
    match fields {
        Fields::Named(_) => format!(" {{ {} }}", texts.join(", ")),
        Fields::Unnamed(_) => format!("({})", texts.join(", ")),
        Fields::Unit => String::new(),
    }
}

/// The names that `use` brings in, each with its whole path; `*` for all.
fn leaves(tree: &UseTree) -> Vec<(String, Vec<String>)> {
    match tree {
        UseTree::Path(path) => {
            let name = path.ident.to_string();
            let inner = leaves(&path.tree).into_iter();
            inner
                .map(|(leaf, rest)| {
                    let rest = if rest == ["self"] { Vec::new() } else { rest };
                    let leaf = if leaf == "self" { name.clone() } else { leaf };
                    (leaf, [vec![name.clone()], rest].concat())
                })
                .collect()
        }
        UseTree::Group(group) => group.items.iter().flat_map(leaves).collect(),
        UseTree::Name(name) => vec![(name.ident.to_string(), vec![name.ident.to_string()])],
        UseTree::Rename(rename) => vec![(rename.rename.to_string(), vec![rename.ident.to_string()])],
        UseTree::Glob(_) => vec![("*".into(), vec!["*".into()])],
    }
}

fn source(module: &Path) -> PathBuf {
    let file = module.with_extension("rs");
    if file.exists() { file } else { module.join("mod.rs") }
}

fn is_public(visibility: &Visibility) -> bool {
    matches!(visibility, Visibility::Public(_))
}

fn is_listed(attributes: &[Attribute]) -> bool {
    is_there(attributes) && !is_hidden(attributes)
}

fn is_hidden(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| text(&attribute.meta) == "doc(hidden)")
}

/// Whether users have it at all: not what is only for tests.
fn is_there(attributes: &[Attribute]) -> bool {
    let absent = ["cfg(test)", "cfg(loom)", "cfg(feature = \"hooks\")"];
    !attributes.iter().any(|attribute| absent.contains(&text(&attribute.meta).as_str()))
}

/// Tokens without attributes, so without comments.
fn bare(tokens: TokenStream) -> TokenStream {
    let mut tokens = tokens.into_iter().peekable();
    let mut kept = Vec::new();
    while let Some(token) = tokens.next() {
        match token {
            TokenTree::Punct(punct) if punct.as_char() == '#' => _ = tokens.next(),
            TokenTree::Group(group) => {
                kept.push(TokenTree::Group(proc_macro2::Group::new(group.delimiter(), bare(group.stream()))));
            }
            token => kept.push(token),
        }
    }
    kept.into_iter().collect()
}

/// A declaration as text, or as tokens.
trait ToText {
    fn to_text(&self) -> String;
}

impl ToText for String {
    fn to_text(&self) -> String {
        self.clone()
    }
}

impl ToText for &syn::Signature {
    fn to_text(&self) -> String {
        text(self)
    }
}

/// Tokens as people write them: proc_macro2 puts a space between any two.
fn text(tokens: impl ToTokens) -> String {
    const SPACES: [(&str, &str); 24] = [
        (" : ", ": "),
        (" :: ", "::"),
        (":: ", "::"),
        (" <", "<"),
        ("< ", "<"),
        (" >", ">"),
        (" (", "("),
        ("( ", "("),
        (" )", ")"),
        (" ]", "]"),
        (" ,", ","),
        (" ;", ";"),
        ("& ", "&"),
        ("* ", "*"),
        (" ? ", "?"),
        (",)", ")"),
        (",>", ">"),
        ("->(", "-> ("),
        (",(", ", ("),
        (":(", ": ("),
        ("=(", "= ("),
        ("mut(", "mut ("),
        // Whether a parameter may be changed inside is nobody's business outside.
        ("(mut ", "("),
        (", mut ", ", "),
    ];
    let text = tokens.to_token_stream().to_string();
    SPACES.iter().fold(text, |text, (from, to)| text.replace(from, to))
}

#[test]
fn signatures_read_as_people_write_them() {
    for signature in [
        "fn f<'a, T: Into<u8> + 'a>(&'a mut self, x: &[u8], y: [u8; 4]) -> Result<(), Box<dyn Error>>",
        "unsafe fn f(x: *const u8, (a, b): (u8, crate::X)) -> (u8, [u8; 2])",
        "const fn f(x: impl FnOnce(&mut u8) -> bool, y: Option<<T as U>::V>) -> &'static str",
        "fn f(x: &'a mut [u8], y: impl Iterator<Item = (u8, u8)>, z: &mut (u8, u8)) -> [u8; 2]",
    ] {
        assert_eq!(text(syn::parse_str::<syn::Signature>(signature).unwrap()), signature);
    }
}
