mod cost;
mod lacking;
mod matrix;
