//! Reads the imports between the files of a crate.
//!
//! A file imports another file if it names an item of that file. Names are resolved as the compiler does it,
//! as far as this check needs it: through `use`, re-exports, globs and nested modules. A re-export is not an
//! import. A file that names a re-exported item imports the file that defines the item. Items for tests
//! (`#[cfg(test)]`, with or without fuzz targets) are left out. Names inside macro calls are found by their
//! tokens.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use proc_macro2::{TokenStream, TokenTree};
use syn::visit::{self, Visit};
use syn::{Attribute, Item, ItemMod, ItemUse, Macro, UseTree, Visibility};

/// Each file of a crate with the files that it names.
pub(crate) type Imports = BTreeMap<PathBuf, BTreeSet<PathBuf>>;

/// Reads the imports of the crate whose root is the file `root`.
///
/// # Errors
/// A file cannot be read or is not valid Rust.
pub(crate) fn read(root: &Path) -> Result<Imports> {
    let mut krate = Crate::default();
    krate.read_file(root, Vec::new(), true)?;
    Ok(krate.imports())
}

/// Names from the crate's root down: `["file", "size"]` for `crate::file::size`.
type ModulePath = Vec<String>;

/// The meanings of a name in a module. A name can be a module and a function at once, because each of these
/// has names of its own (its namespace).
#[derive(Clone, Default)]
struct Meanings {
    /// A module below this one.
    is_module: bool,
    /// A type or a trait that is defined there.
    is_type: bool,
    /// A function, a constant or a macro that is defined there.
    is_value: bool,
    /// The paths of `use`. Each is another name for what is there.
    aliases: Vec<Vec<String>>,
}

#[derive(Default)]
struct Module {
    file: PathBuf,
    names: BTreeMap<String, Meanings>,
    /// Paths of `use path::*`.
    globs: Vec<Vec<String>>,
    /// Paths that its code names, as written.
    named: BTreeSet<Vec<String>>,
}

#[derive(Default)]
struct Crate {
    modules: BTreeMap<ModulePath, Module>,
}

impl Crate {
    /// Reads the file of module `at`. The children of `mod.rs`, `lib.rs` and `main.rs` lie beside the file.
    fn read_file(&mut self, file: &Path, at: ModulePath, is_root: bool) -> Result<()> {
        let text = fs::read_to_string(file).with_context(|| format!("{} cannot be read", file.display()))?;
        let syntax =
            syn::parse_file(&text).with_context(|| format!("{} is not valid Rust", file.display()))?;
        let dir = file.parent().unwrap_or(file);
        let has_own_folder = is_root || file.file_name().is_some_and(|name| name == "mod.rs");
        let children =
            if has_own_folder { dir.to_owned() } else { dir.join(file.file_stem().unwrap_or_default()) };
        self.read_items(&syntax.items, file, &children, at)
    }

    fn read_items(&mut self, items: &[Item], file: &Path, children: &Path, at: ModulePath) -> Result<()> {
        let mut module = Module { file: file.to_owned(), ..Module::default() };
        for item in items {
            match item {
                Item::Mod(below) if !is_for_tests(&below.attrs) => {
                    module.meanings(&below.ident.to_string()).is_module = true;
                    self.read_child(below, file, children, &at)?;
                }
                Item::Use(import) if !is_for_tests(&import.attrs) => module.read_use(import),
                item => module.define(item),
            }
            let mut names = Names(&mut module.named);
            names.visit_item(item);
        }
        self.modules.insert(at, module);
        Ok(())
    }

    fn read_child(&mut self, child: &ItemMod, file: &Path, children: &Path, at: &[String]) -> Result<()> {
        let name = child.ident.to_string();
        let below = [at, std::slice::from_ref(&name)].concat();
        if let Some((_, items)) = &child.content {
            return self.read_items(items, file, &children.join(&name), below);
        }
        let candidates = [children.join(format!("{name}.rs")), children.join(&name).join("mod.rs")];
        match candidates.iter().find(|path| path.exists()) {
            Some(path) => self.read_file(path, below, false),
            None => bail!("{}: the file of module {name} is not in its place", file.display()),
        }
    }

    fn imports(&self) -> Imports {
        let mut imports = Imports::new();
        for (at, module) in &self.modules {
            let into = imports.entry(module.file.clone()).or_default();
            for path in &module.named {
                if let Some(file) = self.file_of(at, path, 0)
                    && *file != module.file
                {
                    into.insert(file.clone());
                }
            }
        }
        imports
    }

    /// Returns the file that defines the item `path` of module `at`, or `None` if it is of another crate.
    fn file_of(&self, at: &[String], path: &[String], depth: usize) -> Option<&PathBuf> {
        /// Ends a circle of aliases.
        const DEPTH_MAX: usize = 16;
        let module = self.modules.get(at)?;
        let (first, rest) = path.split_first().filter(|_| depth < DEPTH_MAX)?;
        let go_on = |at: &[String]| match rest {
            [] => self.modules.get(at).map(|module| &module.file),
            rest => self.file_of(at, rest, depth + 1),
        };
        let below = || go_on(&[at, std::slice::from_ref(first)].concat());
        let through = |path: &[String]| self.file_of(at, &[path, rest].concat(), depth + 1);
        match (first.as_str(), module.names.get(first)) {
            ("crate" | "$crate", _) => go_on(&[]),
            ("self", _) => go_on(at),
            ("super", _) => go_on(at.split_last()?.1),
            (_, None) => {
                module.globs.iter().find_map(|glob| through(&[glob.as_slice(), &path[..1]].concat()))
            }
            (_, Some(Meanings { is_module, is_type, is_value, aliases })) => {
                let alias = || aliases.iter().find_map(|alias| through(alias));
                // Only a module or a type has names behind it. A path that ends here more probably names the
                // item than a module of the same name, which is often private.
                if *is_type || (*is_value && rest.is_empty()) {
                    Some(&module.file)
                } else if *is_module && !rest.is_empty() {
                    below().or_else(alias)
                } else {
                    alias().or_else(|| is_module.then(below).flatten())
                }
            }
        }
    }
}

impl Module {
    fn read_use(&mut self, import: &ItemUse) {
        let is_private = matches!(import.vis, Visibility::Inherited);
        self.read_tree(&import.tree, &mut Vec::new(), is_private);
    }

    fn read_tree(&mut self, tree: &UseTree, before: &mut Vec<String>, is_private: bool) {
        let mut leaf = |ident: &syn::Ident, alias: &syn::Ident| {
            let mut path = before.clone();
            if ident != "self" {
                path.push(ident.to_string());
            }
            let name = if ident == "self" { path.last().cloned() } else { Some(alias.to_string()) };
            // A trait may be imported only for its methods. The code then does not name it again.
            if is_private {
                self.named.insert(path.clone());
            }
            if let Some(name) = name.filter(|name| *name != path[0] || path.len() > 1) {
                self.meanings(&name).aliases.push(path);
            }
        };
        match tree {
            UseTree::Name(name) => leaf(&name.ident, &name.ident),
            UseTree::Rename(rename) => leaf(&rename.ident, &rename.rename),
            UseTree::Glob(_) => self.globs.push(before.clone()),
            UseTree::Group(group) => {
                group.items.iter().for_each(|tree| self.read_tree(tree, before, is_private));
            }
            UseTree::Path(path) => {
                before.push(path.ident.to_string());
                self.read_tree(&path.tree, before, is_private);
                before.pop();
            }
        }
    }

    fn meanings(&mut self, name: &str) -> &mut Meanings {
        self.names.entry(name.to_owned()).or_default()
    }

    fn define(&mut self, item: &Item) {
        let (ident, is_type) = match item {
            Item::Enum(item) => (&item.ident, true),
            Item::Struct(item) => (&item.ident, true),
            Item::Trait(item) => (&item.ident, true),
            Item::Type(item) => (&item.ident, true),
            Item::Union(item) => (&item.ident, true),
            Item::Const(item) => (&item.ident, false),
            Item::Fn(item) => (&item.sig.ident, false),
            Item::Static(item) => (&item.ident, false),
            Item::Macro(syn::ItemMacro { ident: Some(ident), .. }) => (ident, false),
            _ => return,
        };
        let meanings = self.meanings(&ident.to_string());
        *if is_type { &mut meanings.is_type } else { &mut meanings.is_value } = true;
    }
}

/// Collects the paths that an item names.
struct Names<'a>(&'a mut BTreeSet<Vec<String>>);

impl<'ast> Visit<'ast> for Names<'_> {
    fn visit_item(&mut self, item: &'ast Item) {
        let attributes = match item {
            Item::Fn(item) => &item.attrs,
            Item::Impl(item) => &item.attrs,
            Item::Struct(item) => &item.attrs,
            Item::Enum(item) => &item.attrs,
            Item::Const(item) => &item.attrs,
            // A module has its own entry. `read_use` handles `use`.
            Item::Mod(_) | Item::Use(_) => return,
            _ => return visit::visit_item(self, item),
        };
        if !is_for_tests(attributes) {
            visit::visit_item(self, item);
        }
    }

    fn visit_impl_item_fn(&mut self, item: &'ast syn::ImplItemFn) {
        if !is_for_tests(&item.attrs) {
            visit::visit_impl_item_fn(self, item);
        }
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        self.add(path.segments.iter().map(|segment| segment.ident.to_string()).collect());
        visit::visit_path(self, path);
    }

    fn visit_macro(&mut self, call: &'ast Macro) {
        visit::visit_macro(self, call);
        self.tokens(call.tokens.clone());
    }

    fn visit_visibility(&mut self, _: &'ast Visibility) {}
}

impl Names<'_> {
    /// Adds a path. Ignores a single lower-case name, which may be a variable with the name of a module.
    fn add(&mut self, path: Vec<String>) {
        let is_variable = path.len() == 1 && path[0].starts_with(|c: char| c.is_lowercase());
        if !is_variable {
            self.0.insert(path);
        }
    }

    /// Takes `a::b::c` from the tokens of a macro call.
    fn tokens(&mut self, tokens: TokenStream) {
        let mut path = Vec::new();
        let mut colons = 0;
        for token in tokens {
            match token {
                TokenTree::Ident(ident) => {
                    if colons != 2 {
                        self.take(&mut path);
                    }
                    path.push(ident.to_string());
                    colons = 0;
                }
                TokenTree::Punct(punct) if punct.as_char() == ':' && !path.is_empty() => colons += 1,
                other => {
                    self.take(&mut path);
                    colons = 0;
                    if let TokenTree::Group(group) = other {
                        self.tokens(group.stream());
                    }
                }
            }
        }
        self.take(&mut path);
    }

    fn take(&mut self, path: &mut Vec<String>) {
        if !path.is_empty() {
            self.add(std::mem::take(path));
        }
    }
}

fn is_for_tests(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        attribute.path().is_ident("cfg")
            && attribute.meta.require_list().is_ok_and(|list| {
                let condition = list.tokens.to_string().replace(' ', "");
                matches!(&*condition, "test" | "any(test,fuzzing)") || condition.starts_with("all(test")
            })
    })
}
