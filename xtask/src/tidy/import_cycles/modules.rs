//! The modules of a crate: their definitions and imports, and the paths in their code.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use proc_macro2::{Spacing, TokenStream, TokenTree};
use quote::ToTokens;
use syn::visit::Visit;
use syn::{Attribute, Item, ItemMod, ItemUse, UseTree, Visibility};

use crate::tidy::tokens::mentions;

/// The modules of a crate, the root first.
#[derive(Default)]
pub struct Modules {
    /// The files, each once.
    pub files: Vec<PathBuf>,
    /// The modules. Inline modules belong to the file that contains them.
    pub all: Vec<Module>,
}

/// One module.
#[derive(Default)]
pub struct Module {
    /// The index of its file.
    pub file: usize,
    /// The index of the module above it.
    pub parent: Option<usize>,
    /// The modules within it.
    pub children: BTreeMap<String, usize>,
    /// The names of its other items.
    pub items: BTreeSet<String>,
    /// Its imports.
    pub imports: Vec<Import>,
    /// The paths of more than one segment in its code.
    pub paths: BTreeSet<Vec<String>>,
}

/// One imported name.
pub struct Import {
    /// The imported path.
    pub path: Vec<String>,
    /// Its name here; `None` for all names of a module.
    pub name: Option<String>,
    /// Whether others may import it from here.
    pub is_reexport: bool,
}

impl Modules {
    /// Reads the modules of the crate with this root file. Test code is omitted.
    pub fn read(root: &Path) -> Result<Self> {
        let mut modules = Self::default();
        modules.add_file(root, None)?;
        Ok(modules)
    }

    /// Adds the module of a file and all its descendants.
    fn add_file(&mut self, file: &Path, parent: Option<usize>) -> Result<usize> {
        let text =
            fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
        let parsed = syn::parse_file(&text)
            .with_context(|| format!("{} is not made of Rust items", file.display()))?;
        self.files.push(file.to_owned());
        let index = self.push(parent, self.files.len() - 1);
        let folder = folder_below(file);
        self.add_items(index, &parsed.items, &folder)?;
        Ok(index)
    }

    fn push(&mut self, parent: Option<usize>, file: usize) -> usize {
        self.all.push(Module { file, parent, ..Module::default() });
        self.all.len() - 1
    }

    /// Adds items to a module whose file modules are in `folder`.
    fn add_items(&mut self, index: usize, items: &[Item], folder: &Path) -> Result<()> {
        for item in items.iter().filter(|item| !is_test(attributes(item))) {
            match item {
                Item::Mod(module) => self.add_module(index, module, folder)?,
                Item::Use(import) => self.add_imports(index, import),
                other => {
                    let module = &mut self.all[index];
                    module.items.extend(name(other));
                    add_paths(&other.to_token_stream(), &mut module.paths);
                    NestedImports { modules: self, index }.visit_item(other);
                }
            }
        }
        Ok(())
    }

    fn add_module(&mut self, parent: usize, module: &ItemMod, folder: &Path) -> Result<()> {
        let name = module.ident.to_string();
        let index = match &module.content {
            Some((_, items)) => {
                let index = self.push(Some(parent), self.all[parent].file);
                self.add_items(index, items, &folder.join(&name))?;
                index
            }
            None => {
                let flat = folder.join(&name).with_extension("rs");
                let file = if flat.is_file() { flat } else { folder.join(&name).join("mod.rs") };
                self.add_file(&file, Some(parent))?
            }
        };
        self.all[parent].children.insert(name, index);
        Ok(())
    }

    fn add_imports(&mut self, index: usize, import: &ItemUse) {
        if import.leading_colon.is_none() {
            let is_reexport = !matches!(import.vis, Visibility::Inherited);
            flatten(&import.tree, &mut Vec::new(), &mut |path, name| {
                self.all[index].imports.push(Import { path, name, is_reexport });
            });
        }
    }
}

/// Imports within functions, which count as imports of their module.
struct NestedImports<'a> {
    modules: &'a mut Modules,
    index: usize,
}

impl<'ast> Visit<'ast> for NestedImports<'_> {
    fn visit_item_use(&mut self, import: &'ast ItemUse) {
        self.modules.add_imports(self.index, import);
    }
}

/// Returns the folder with the file modules of a file's module.
fn folder_below(file: &Path) -> PathBuf {
    let is_own =
        file.file_stem().is_some_and(|stem| ["lib", "main", "mod"].iter().any(|own| stem == *own));
    if is_own { file.parent().unwrap_or(file).to_owned() } else { file.with_extension("") }
}

/// Calls `found` with each path of a tree and its name.
fn flatten(
    tree: &UseTree,
    before: &mut Vec<String>,
    found: &mut impl FnMut(Vec<String>, Option<String>),
) {
    let whole = |name: &syn::Ident| {
        let mut path = before.clone();
        // `a::{self}` is `a`.
        if name != "self" || path.is_empty() {
            path.push(name.to_string());
        }
        path
    };
    match tree {
        UseTree::Path(path) => {
            before.push(path.ident.to_string());
            flatten(&path.tree, before, found);
            before.pop();
        }
        UseTree::Name(last) => {
            let path = whole(&last.ident);
            let name = path.last().cloned();
            found(path, name);
        }
        UseTree::Rename(last) => found(whole(&last.ident), Some(last.rename.to_string())),
        UseTree::Glob(_) => found(before.clone(), None),
        UseTree::Group(group) => {
            group.items.iter().for_each(|tree| flatten(tree, before, found));
        }
    }
}

/// Adds the paths of more than one segment, including those within macros.
fn add_paths(stream: &TokenStream, paths: &mut BTreeSet<Vec<String>>) {
    let tokens: Vec<TokenTree> = stream.clone().into_iter().collect();
    let is_separator = |at: usize| {
        matches!(&tokens.get(at..at + 2), Some([TokenTree::Punct(first), TokenTree::Punct(second)])
            if first.as_char() == ':' && first.spacing() == Spacing::Joint && second.as_char() == ':')
    };
    let mut at = 0;
    while let Some(token) = tokens.get(at) {
        let follows_another = at >= 2 && is_separator(at - 2);
        at += 1;
        match token {
            TokenTree::Group(group) => add_paths(&group.stream(), paths),
            TokenTree::Ident(first) if !follows_another => {
                let mut path = vec![first.to_string()];
                while is_separator(at) {
                    let Some(TokenTree::Ident(next)) = tokens.get(at + 2) else { break };
                    path.push(next.to_string());
                    at += 3;
                }
                if path.len() > 1 {
                    paths.insert(path);
                }
            }
            _ => {}
        }
    }
}

/// Whether the item is compiled only for tests.
fn is_test(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        let tokens = attribute.meta.to_token_stream();
        attribute.path().is_ident("cfg") && mentions(&tokens, "test") && !mentions(&tokens, "not")
    })
}

fn attributes(item: &Item) -> &[Attribute] {
    match item {
        Item::Const(item) => &item.attrs,
        Item::Enum(item) => &item.attrs,
        Item::Fn(item) => &item.attrs,
        Item::Impl(item) => &item.attrs,
        Item::Macro(item) => &item.attrs,
        Item::Mod(item) => &item.attrs,
        Item::Static(item) => &item.attrs,
        Item::Struct(item) => &item.attrs,
        Item::Trait(item) => &item.attrs,
        Item::Type(item) => &item.attrs,
        Item::Union(item) => &item.attrs,
        Item::Use(item) => &item.attrs,
        _ => &[],
    }
}

fn name(item: &Item) -> Option<String> {
    let name = match item {
        Item::Const(item) => &item.ident,
        Item::Enum(item) => &item.ident,
        Item::Fn(item) => &item.sig.ident,
        Item::Macro(item) => item.ident.as_ref()?,
        Item::Static(item) => &item.ident,
        Item::Struct(item) => &item.ident,
        Item::Trait(item) => &item.ident,
        Item::Type(item) => &item.ident,
        Item::Union(item) => &item.ident,
        _ => return None,
    };
    Some(name.to_string())
}
